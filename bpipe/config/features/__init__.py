"""What of Megatron this project trains with, and in which state its use of it is."""
