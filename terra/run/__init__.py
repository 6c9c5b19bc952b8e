"""Run a program's operations beside the program."""
