"""One rank of a test's training runs by a later Megatron: every function that its main has given a further parameter,
or may give one, has one more with a default.

In and out: as worker.py. What is called with another value than the default ends the run.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import functools
    import inspect
    from collections.abc import Callable
    from typing import Any

    from tests.gloo import worker

    # isort: split
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers

    def later(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = inspect.signature(function)
        further = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            assert kwargs.pop(name, None) is None
            return function(*args, **kwargs)

        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), further])  # type: ignore[attr-defined]
        return run

    def linear(*args: Any, output_dtype: Any = None, **kwargs: Any) -> Any:
        assert output_dtype is None
        return LINEAR(*args, **kwargs)

    LINEAR = layers.linear_with_grad_accumulation_and_async_allreduce
    parameters = list(inspect.signature(LINEAR).parameters.values())
    # As in Megatron's main: behind what both have, and in another place than here.
    extra = inspect.Parameter("output_dtype", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    linear.__signature__ = inspect.Signature([*parameters, extra])  # type: ignore[attr-defined]
    linear.warned = LINEAR.warned  # type: ignore[attr-defined]
    layers.linear_with_grad_accumulation_and_async_allreduce = linear
    for name in (
        *("forward_step", "backward_step", "forward_backward_pipelining_without_interleaving"),
        *("forward_backward_pipelining_with_interleaving", "deallocate_output_tensor", "check_first_val_step"),
    ):
        setattr(schedules, name, later(getattr(schedules, name), "of_a_later_version"))
    worker.main(*sys.argv[1:])
