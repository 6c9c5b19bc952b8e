"""Let ranks with room keep optimizer state of ranks without.

In: one prediction that does not fit. Out: `StateHosts`, and words for it.

The moments of Adam are needed once an iteration, when no activations are held: they wait on another rank while
micro-batches are computed, and are home for the update. What passes is the same twice in an iteration, where an
activation passes twice for every micro-batch that leaves. `megatron.scheduling.memory.optimizer_state` does so in
training. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.flags.budgets import HostedState, write_moves
from bpipe.models.cluster import gib_text
from bpipe.models.layout import Setup
from bpipe.models.links import links
from bpipe.models.memory import RankMemory
from bpipe.models.profile import Profile
from bpipe.models.states import parameter_bytes
from bpipe.plan.predict import SetupPrediction, predict

FLAG = "--bpipe-optimizer-hosts"


@dataclass(frozen=True, slots=True)
class StateHosts:
    """Moves of optimizer state and their prediction: memory of every rank, and the longest delay of an iteration."""

    prediction: SetupPrediction
    moves: tuple[HostedState, ...]
    memory: tuple[RankMemory, ...]
    longer_s: float

    @property
    def moved_bytes(self) -> int:
        """Bytes moved in an iteration, there and back, of one device of each rank together."""
        return 2 * sum(move.num_bytes for move in self.moves)

    @property
    def iteration_s(self) -> float:
        return self.prediction.timing.iteration_s + self.longer_s


def state_hosts(prediction: SetupPrediction) -> StateHosts | None:
    """Return the fewest moves that let every rank fit; None where none are needed, none suffice, or activations move
    already.

    Hosts on the giver's node come first, of them the one with most room.
    """
    setup = prediction.setup
    if prediction.fits or setup.balance is not None or setup.num_pipes > 1:
        return None
    room = {row.rank: row.limit_bytes - row.peak_bytes for row in prediction.memory if row.fits}
    moves: list[HostedState] = []
    for row in sorted(prediction.memory, key=lambda one: one.limit_bytes - one.peak_bytes):
        lacking = max(0, row.peak_bytes - row.limit_bytes)
        if lacking > _movable(row, prediction):
            return None
        for host in _nearest(setup, row.rank, room):
            taken = min(lacking, room[host])
            if taken:
                moves.append(HostedState(row.rank, host, taken))
                room[host] -= taken
                lacking -= taken
        if lacking:
            return None
    memory = tuple(_with_moves(row, moves) for row in prediction.memory)
    return StateHosts(prediction, tuple(moves), memory, 2 * _one_way_s(setup, moves))


def _movable(row: RankMemory, prediction: SetupPrediction) -> int:
    """What of a rank's state may be away while micro-batches are computed; none where even the update, which needs
    it home, is too much."""
    updating = row.state_bytes + row.overhead_bytes + row.update_bytes
    if updating > row.limit_bytes:
        return 0
    setup = prediction.setup
    _, _, state, _ = parameter_bytes(setup)
    # Main weights stay, others read them.
    moments = sum(setup.state_types.state_bytes(setup.precision, setup.fp8)[1:])
    return row.optimizer_bytes * moments // state


def _nearest(setup: Setup, giver: int, room: dict[int, int]) -> Iterator[int]:
    joined = links(setup)
    yield from sorted(room, key=lambda host: (joined.crosses(giver, host), -room[host], host))


def _with_moves(row: RankMemory, moves: Sequence[HostedState]) -> RankMemory:
    """While micro-batches are computed. What a giver has back for its update was room for them."""
    gained = sum(move.num_bytes for move in moves if move.host == row.rank)
    lost = sum(move.num_bytes for move in moves if move.giver == row.rank)
    return replace(row, optimizer_bytes=row.optimizer_bytes + gained - lost, update_bytes=row.update_bytes + lost)


def _one_way_s(setup: Setup, moves: Sequence[HostedState]) -> float:
    """Return seconds of moves one way: no rank of a move is in those before it in the list when it begins."""
    joined, free = links(setup), [0.0] * setup.pipeline
    for giver, host, num_bytes in moves:
        free[giver] = free[host] = max(free[giver], free[host]) + float(joined.link(giver, host).seconds(num_bytes))
    return max(free)


def instead_of_balancing(setup: Setup, profile: Profile | None = None, formula: str = "megatron") -> StateHosts | None:
    """Return moves of optimizer state that let a setup fit without balancing which otherwise fits only balanced."""
    return state_hosts(predict(replace(setup, balance=None), profile, formula=formula))


# -- as text
# ----------------------------------------------------------------------------------------------------------------------


def describe_moves(found: StateHosts) -> str:
    """Describe what would make it fit and what it costs."""
    return (
        f"with Adam's moments on other ranks it would fit without balancing: {FLAG} {write_moves(found.moves)}; this "
        f"moves {gib_text(found.moved_bytes)} GiB per iteration, which then takes {found.iteration_s:.3f} s"
    )


def moves_values(found: StateHosts) -> dict[str, Any]:
    """Return the moves as JSON values."""
    return {
        "moves": [{"rank": one.giver, "host": one.host, "num_bytes": one.num_bytes} for one in found.moves],
        "moved_bytes": found.moved_bytes,
        "iteration_s": found.iteration_s,
        "peak_bytes": [row.peak_bytes for row in found.memory],
        "megatron_flags": [FLAG, write_moves(found.moves)],
    }
