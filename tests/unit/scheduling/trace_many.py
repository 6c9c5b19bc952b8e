"""Trace several launches in one process: lists of flags as JSON on stdin, their traces as JSON on stdout."""

import contextlib
import io
import json
import sys

from megatron.scheduling.trace import stages


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        stages.prepare()
        traces = [_trace(flags) for flags in json.load(sys.stdin)]
    print(json.dumps(traces))


def _trace(flags: list[str]) -> object:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    # Its tensors have the previous launch's number of further tokens.
    MTPLossLoggingHelper.tracker.clear()
    try:
        return stages.trace(flags)
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    main()
