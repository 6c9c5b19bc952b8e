"""Write what a run did to the report's folder and Megatron's writers; measure stages."""
