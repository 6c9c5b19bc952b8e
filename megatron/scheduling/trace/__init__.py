"""Build and run stages of a launch at true size without memory, to see what they hold."""
