"""The calls around torch's runtime, its buffers, its lists and its regions, each a little wrong, and which tests must
notice.

As a program: `python -m tests.unit.torch.mutations FILE`, as `tests.unit.runtime.mutations`.
"""

from __future__ import annotations

import sys

from tests.unit.runtime.mutations import Mutation, run_table

CALLS, BUFFERS = "tests/unit/torch/test_calls.py", "tests/unit/torch/test_buffers.py"
JUDGED = "tests/unit/torch/test_judged.py"
EXCHANGE, CHECKPOINTS = "tests/unit/torch/test_torch_exchange.py", "tests/unit/runtime/test_checkpoints.py"
DTENSORS = "tests/unit/runtime/test_dtensors.py"


def calls(line: str, instead: str, nth: int = 0) -> Mutation:
    return Mutation("bpipe/torch/calls.py", line, instead, (CALLS,), nth)


def buffers(line: str, instead: str, nth: int = 0) -> Mutation:
    return Mutation("bpipe/torch/buffers.py", line, instead, (BUFFERS,), nth)


TABLE = (
    calls("self._ahead(action)", "pass"),
    calls("self._behind(index)", "pass"),
    calls("self._hooks.begin()", "pass"),
    calls("self._hooks.before(action)", "pass"),
    calls("self._hooks.after(action, outputs, inputs)", "pass"),
    calls("self._hooks.after(action)", "pass"),
    calls("self._hooks.sent(action)", "pass"),
    calls("self._hooks.communicated()", "pass"),
    # Behind what reduces gradients, which all ranks do together.
    calls("if index == self._last:", "if index == len(self._actions) - 1:"),
    # Before the message that others wait for.
    calls(
        "if self._unsent is not None and not self._is_followed_by_send(index):",
        "if self._unsent is not None:",
    ),
    # Before the message, where a wait for another stands between.
    calls(
        "return next((kind for kind in later if kind not in SEND_WAITS), None) in _SENDS",
        "return next(later, None) in _SENDS",
    ),
    calls("self._sent()", "pass"),
    calls("self._sent()", "pass", 1),
    calls("self._used(action)", "pass"),
    calls("self.computes(Action(index, Kind.FORWARD, fwd_chunk_id))", "pass"),
    calls("self.computes(action)", "pass"),
    calls("self.computes(action)", "pass", 1),
    calls("self.backward_ran(action)", "pass"),
    calls("self.backward_ran(action)", "pass", 1),
    calls("setattr(holder, name, value)", "pass"),
    calls("delattr(holder, name)", "pass"),
    calls("setattr(holder, name, before)", "pass"),
    buffers("self.end()", "pass"),
    buffers("self._empty(key)", "pass"),
    buffers("storage.resize_(0)", "pass"),
    calls("undo.callback(_replace(stage, name, wrapper))", "_replace(stage, name, wrapper)"),
    buffers("buffer.untyped_storage().resize_(nbytes)", "pass"),
    buffers("self._empty(key)", "pass", 1),
    buffers("self._taken = {}", "pass"),
    buffers("self._taken.pop(key, None)", "pass"),
    buffers("if not KEEPS_BUFFERS:", "if False:"),
    buffers(
        "if storage.nbytes() and storage.resizable() and num_storage_uses(storage) == _ONLY_THE_BUFFER:",
        "if storage.nbytes():",
    ),
    buffers(
        "self._full_bytes[key] = [full or before for full, before in zip(now, known, strict=True)]",
        "self._full_bytes[key] = now",
    ),
    buffers("if backward.kind is not Kind.BACKWARD_INPUT:", "if True:"),
    buffers("if self._is_here(index + (1 if of_gradients else -1)):", "if False:"),
    Mutation("bpipe/torch/checks.py", "rows.append([])", "pass", (JUDGED,)),
    Mutation("bpipe/torch/checks.py", "before = action", "pass", (JUDGED,)),
    Mutation("bpipe/torch/checks.py", "if action.computation_type not in SEND_WAITS:", "if True:", (EXCHANGE,)),
    Mutation(
        "bpipe/torch/checks.py",
        "elif action.computation_type in _SENDS and not _follows(before):",
        "elif False:",
        (JUDGED,),
    ),
    Mutation("bpipe/torch/checks.py", "if stuck:", "if False:", (JUDGED,)),
    Mutation("bpipe/schedule/lowering/torch_receives.py", "posted[receiver].add(value)", "pass", (EXCHANGE,)),
    Mutation(
        "bpipe/schedule/lowering/torch_receives.py",
        "received[receiver][-1].append(value)",
        "received[receiver][0].append(value)",
        (EXCHANGE,),
    ),
    # A message that does not wait for the one before it in its queue.
    Mutation("bpipe/schedule/check/deadlock.py", "if self.board.missing[value]:", "if False:", (EXCHANGE,)),
    Mutation("bpipe/runtime/checkpoints.py", "self._frames.setdefault(id(frame), frame)", "pass", (CHECKPOINTS,)),
    Mutation("bpipe/runtime/checkpoints.py", "waiting.append(item.val)", "pass", (CHECKPOINTS,)),
    Mutation("bpipe/runtime/capture.py", "use.add(payload._base, False, None)", "pass", (DTENSORS,)),
    Mutation("bpipe/runtime/capture.py", "use.copies.append(own_output)", "pass", (DTENSORS,)),
)

if __name__ == "__main__":
    run_table(TABLE, sys.argv[1])
