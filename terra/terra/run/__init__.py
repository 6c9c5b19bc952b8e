"""Run a program's operations next to the program."""
