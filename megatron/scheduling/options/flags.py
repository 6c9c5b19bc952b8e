"""Declare our flags to Megatron's parser, from the table. In: an argparse parser. Out: the same with them.

Imports no torch and no Megatron.
"""

import argparse

from bpipe.config.flags.parser import declare
from bpipe.config.flags.trainer import TRAINER


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our groups of flags; give this to Megatron as its `extra_args_provider`."""
    for group in TRAINER:
        to = parser.add_argument_group(f"bpipe: {group.title}", "memory-balanced pipeline parallelism")
        for flag in group.flags:
            declare(to, flag.of_launch)
    return parser
