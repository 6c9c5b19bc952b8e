"""Several trainings in one process over `peer`: each returns its resources, and the next one is right.

Checks that every gradient is right in each training, that the device has as much free memory after each as after the
first, and that torch computes as before. The pair is two processes on one device. Resources that a training left open
broke the next one: on an H200, a mapping or a kernel failed with "resource already mapped".
"""

import torch
import torch.distributed as dist

from bpipe.runtime.links import disconnect
from bpipe.transport.streams import synchronize
from tests.gpu import peer
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import Result, drawn, repeats
from tests.gpu.pair import Facts, Member, run_engine, run_pair

TRAININGS = 3
ITERATIONS = 2
SIZES = peer.SIZES


def run(on: Accelerator, sizes: peer.Sizes, until: float) -> Result:
    result = Result(ok=True)
    evictor, lender = run_pair(_part, on, "peer", sizes, until)
    judge(evictor, lender, result)
    result.facts = {"evictor": evictor, "lender": lender}
    return result


def judge(evictor: Facts, lender: Facts, result: Result) -> None:
    """Check the results of both processes."""
    result.check("transport chosen for the pair", evictor["transport"] == "peer", evictor["transport"])
    lent_bytes = lender["trainings"][0]["host_buffer_bytes"]
    for name, facts in (("evictor", evictor), ("lender", lender)):
        wrong = [training["wrong"] for training in facts["trainings"]]
        result.check(
            f"gradients, {name}", not any(wrong), f"{wrong} of {ITERATIONS} iterations of each training differ"
        )
        first, *later = facts["free_bytes"]
        fell = [first - now for now in later]
        # A library may keep a little, but not what was lent.
        result.check(
            f"device memory, {name}",
            all(nbytes < lent_bytes / 2 for nbytes in fell),
            f"free bytes fell by {fell} since the first training, which lent {lent_bytes}",
        )
        result.check(f"torch afterwards, {name}", facts["computes"], "the same product and softmax as before")
    result.check("memory was lent", lent_bytes > 0, f"{lent_bytes} B")


def _part(member: Member, sizes: peer.Sizes, until: float) -> Facts:
    device = member.on.device
    expected = _computed(device)
    trainings, free_bytes, connection = [], [], member.connection
    for _ in range(TRAININGS):
        trainings.append(run_engine(member, connection.transport(), sizes, repeats(ITERATIONS, until, ITERATIONS)))
        disconnect(None, [connection])
        synchronize(device)
        torch.accelerator.empty_cache()
        # Both have returned everything, and neither has started again.
        dist.barrier()
        free_bytes.append(torch.accelerator.get_memory_info(device)[0])
        dist.barrier()
        connection = member.connect()
    member.connection = connection
    return {
        "trainings": trainings,
        "free_bytes": free_bytes,
        "computes": torch.equal(_computed(device), expected),
    }


def _computed(device: torch.device) -> torch.Tensor:
    number = drawn((256, 256), 5, device)
    return torch.softmax(number @ number, dim=-1).cpu()
