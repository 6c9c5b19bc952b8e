"""Say over which ports messages and transfers pass, and for how long.

In: `Dependencies` and `Costs`. Out: a `Path` for each group of values, and ports. Knows no clock.
"""

from __future__ import annotations

from typing import NamedTuple

from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.layout import Vocabulary
from bpipe.simulate.cost import Costs, Links, Number, host_port, ports


class Path(NamedTuple):
    """Ports that a message takes, and its seconds.

    A collective takes no ports, but turns with others of its sort.
    """

    port_out: int
    port_in: int
    seconds: Number

    @property
    def is_collective(self) -> bool:
        return self.port_out < 0


def paths(dependencies: Dependencies, costs: Costs, microbatch: int, num_ranks: int) -> list[Path | None]:
    """Return the paths of one micro-batch's messages, or one slice's, by group of values. None: between no ranks."""
    links, num_stages, seconds = costs.links, dependencies.num_stages, _collective_seconds(costs, dependencies)
    width = dependencies.num_microbatches
    found: list[Path | None] = []
    for group in range(dependencies.num_values // width):
        route = dependencies.route(group * width + microbatch)
        parties = route.parties
        if len(parties) < 2 or not route.takers:
            found.append(None)
        elif len(parties) > 2 or len(route.makers) > 1:
            latency = max(links.link(parties[0], other).latency_s for other in parties[1:])
            found.append(Path(~group, ~group, latency + seconds[dependencies.sort(group * width)]))
        else:
            # A gradient is as large as the output of the stage before.
            sender = group if group < num_stages else group - num_stages - 1
            sent_bytes = costs.of(sender, microbatch).sent_bytes
            taken = ports_between(links, num_ranks, *parties)
            found.append(Path(*taken, links.link(*parties).message_s(sent_bytes)))
    return found


def _collective_seconds(costs: Costs, dependencies: Dependencies) -> dict[str, Number]:
    """Return seconds of collectives by the sort of the values that pass."""
    seconds = costs.collectives
    # Where nothing is reduced behind T, it is behind the statistics.
    also = seconds.reduce_s if dependencies.layout.vocabulary is Vocabulary.TWO else 0
    return {
        "output": seconds.broadcast_s,
        "gradient": seconds.input_broadcast_s,
        "statistics": seconds.gather_s + also,
        "last gradient": seconds.reduce_s,
        "embeddings": seconds.input_reduce_s,
    }


def ports_between(links: Links, num_ranks: int, sender: int, receiver: int) -> tuple[int, int]:
    """Return the sender's port out and the receiver's port in.

    From p = `num_ranks` on, `sender` and `receiver` are the ends of a rank's link to its node's memory: p + rank on the
    device, 2p + rank there.
    """
    if sender >= num_ranks:
        port = host_port(sender % num_ranks, num_ranks, sender < receiver)
        return port, port
    between = links.crosses(sender, receiver)
    return ports(sender, between)[0], ports(receiver, between)[1]
