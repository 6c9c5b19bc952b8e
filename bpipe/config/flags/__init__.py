"""The table of flags: `schedules`, `configurations`, `outputs` and `trainer` have one row per flag.

Parsers of commands and trainer, the reading and writing of launches, and the reference pages are made from it.
"""
