"""Lines for the log on the links of pairs: what they measured, and whether that is enough."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from bpipe.schedule.hosts import Pair
from bpipe.simulate.cost import steady_bytes_per_s
from bpipe.transport.connect import MeasuredLink


def describe(links: Iterable[MeasuredLink], stages: Mapping[Pair, Pair]) -> str:
    """Describe each pair of stages in one line: the transport, what its links measured, and what else was tried."""
    of_stages: dict[Pair, list[MeasuredLink]] = defaultdict(list)
    for link in links:
        low, high = sorted(stages[link.ranks])
        of_stages[low, high].append(link)
    lines = ["links, measured in both directions:"]
    for pair, same in sorted(of_stages.items()):
        who = f"stages {pair[0]} and {pair[1]}" if pair[0] != pair[1] else f"stage {pair[0]} and its node's CPU memory"
        for name in sorted({link.transport for link in same}):
            lines.append(f"  {who}{_chosen(name, [link for link in same if link.transport == name])}")
    return "\nbpipe: ".join(lines)


def _chosen(name: str, links: Sequence[MeasuredLink]) -> str:
    """Describe links of the same stages: their transport, their speed, and what else was tried on the first of them."""
    of = "ranks" if links[0].ranks[0] == links[0].ranks[1] else "pairs of ranks"
    count = "" if len(links) == 1 else f", {len(links)} {of}"
    tried = [
        f"{other} {_range(link.bytes_per_s[other] for link in links if other in link.bytes_per_s)}"
        for other in links[0].bytes_per_s
        if other != name
    ]
    tried += [f"{other} not usable: {why}" for other, why in links[0].refused.items()]
    also = f" ({'; '.join(tried)})" if tried else ""
    return f"{count}: {name} {_range(link.bytes_per_s[name] for link in links)}{also}"


def _range(bytes_per_s: Iterable[float]) -> str:
    speeds = sorted(speed / 1e9 for speed in bytes_per_s)
    low, high = f"{speeds[0]:.3g}", f"{speeds[-1]:.3g}"
    return f"{low} GB/s" if low == high else f"{low} to {high} GB/s"


def sufficiency(stage: int, partner: int, moved_bytes: int, window_s: float, bytes_per_s: float) -> tuple[bool, str]:
    """Return whether a link keeps up, and a sentence on that.

    `window_s`: one micro-batch's forward and backward, all chunks.
    """
    # A backward takes about twice as long as a forward.
    needed = steady_bytes_per_s(moved_bytes, window_s / 3)
    enough = needed <= bytes_per_s
    own = stage == partner
    verdict = (
        "NOT enough: transfers will delay the computation. "
        f"{'Evict less' if own else 'Put the pair on one node, or evict less'}"
    )
    where = "its node's memory" if own else f"stage {partner}"
    return enough, (
        f"stage {stage} moves {moved_bytes / 1e6:.4g} MB to {where} and back while a micro-batch computes, about "
        f"{1e3 * window_s:.3g} ms: {needed / 1e9:.3g} GB/s of the link's {bytes_per_s / 1e9:.3g} GB/s, "
        f"{'enough' if enough else verdict}"
    )
