"""A command line as it is typed, for tests that would list its words one a line."""

from __future__ import annotations


def command_words(command: str) -> list[str]:
    return command.split()
