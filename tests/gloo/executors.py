"""Four ranks that run programs with the executor over gloo, one case after another in the same processes.

In: a folder. Out: `<folder>/rank<r>.json`: by case, whether every gradient of this rank's stages has the bits of the
model in one piece, how many bytes of a micro-batch left this rank, and how many came with the partner's. With shards of
the output layer: the largest error beside the model in one piece, of its stages and its shard, and whether balancing
changed no bit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.shards import EarlyShard
from bpipe.runtime.streams import beside, copying_on
from bpipe.schedule.check.rules import check
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.collectives import Collectives, EdgesAndCollectives, SecondStep, SharedGroups, connect_shared
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import connect
from bpipe.transport.distributed import PairGroups
from bpipe.transport.edges import Edges, connect_edges
from tests.support.hand_made import v_flat
from tests.unit.runtime.pipeline import Model, in_one_piece
from tests.unit.runtime.sharded import ShardedModel
from tests.unit.runtime.sharded import in_one_piece as sharded_in_one_piece

CPU = torch.device("cpu")
RANKS, ITERATIONS, TIMEOUT_S = 4, 2, 60.0


def v_uneven() -> Schedule:
    """In V shape and in halves; ranks 0 and 1 evict to each other's neighbours of the V, some of a first chunk
    before any of a second."""
    return balance(v_flat(RANKS, 4), (3, 16, 16, 4), (2, 3, 0, 1))


def v_half_uneven() -> Schedule:
    return balance(build(ScheduleConfig("v-half", RANKS, 8, num_chunks=2)), (4, 3, 12, 12), (2, 3, 0, 1))


SHARDED = ScheduleConfig("1f1b", RANKS, 8, vocabulary=Vocabulary.ONE)
SPLIT = (Vocabulary.ONE, Vocabulary.TWO)
INTERLEAVED = ScheduleConfig("interleaved-1f1b", RANKS, 8, num_chunks=2)
CASES: dict[str, tuple[Callable[[], Schedule], str | None]] = {
    "1f1b": (partial(build, ScheduleConfig("1f1b", RANKS, 8)), None),
    "interleaved": (partial(build, INTERLEAVED), None),
    **{
        f"{name}, balanced over {transport}": (made, transport)
        for transport in ("gloo", "peer")
        for name, made in {
            "1f1b": partial(build, ScheduleConfig("1f1b", RANKS, 8, balance=BalanceConfig())),
            "interleaved": partial(build, replace(INTERLEAVED, balance=BalanceConfig())),
            "v-flat": v_uneven,
            "v-half": v_half_uneven,
        }.items()
    },
}


def engine_of(schedule: Schedule, rank: int, transport: str) -> Engine:
    assert schedule.partners is not None
    pairs = [(stage, schedule.partners[stage]) for stage in range(RANKS) if num_transfers(schedule, stage).evictions]
    connection, _ = connect(pairs, transport, TIMEOUT_S, copying_on(CPU))
    config = EngineConfig(f"rank {rank}", CPU, TransferConfig(minimum_bytes=1, timeout_s=TIMEOUT_S, poison=True))
    return Engine(schedule, rank, connection.transport() if connection else None, config)


def sharded(rank: int, edges: Mapping[int, PairGroups], groups: SharedGroups, vocabulary: Vocabulary) -> dict[str, Any]:
    gradients, moved = [], 0
    for balance_of in (None, BalanceConfig()):
        schedule = build(replace(SHARDED, vocabulary=vocabulary, balance=balance_of))
        model = ShardedModel(RANKS, RANKS)
        engine = engine_of(schedule, rank, "peer") if balance_of else None
        shard, lane = model.shard(rank, vocabulary), beside(CPU, TIMEOUT_S)
        second = SecondStep(shard.late, lane) if isinstance(shard, EarlyShard) else None
        collectives = Collectives(rank, groups, schedule.layout.rank_of_action, CPU, second)
        carried = EdgesAndCollectives(Edges(rank, edges, CPU), collectives)
        executor = Executor(schedule, rank, model.parts(schedule, rank), carried, shard)
        for _ in range(ITERATIONS):
            executor.run(engine)
        lane.close()
        gradients.append([model.weights[rank].grad, model.shards[rank].grad])
        if engine:
            moved = sum(engine.moved_bytes.values())
            engine.release()
    expected = sharded_in_one_piece(RANKS, RANKS, SHARDED.num_microbatches)
    rows = expected.output.grad.chunk(RANKS)[rank]  # type: ignore[union-attr]
    wanted = expected.weights[rank].grad * ITERATIONS, rows * ITERATIONS  # type: ignore[operator]
    return {
        "error": max(float((one - other).abs().max()) for one, other in zip(gradients[0], wanted, strict=True)),
        "balanced_same": all(torch.equal(one, other) for one, other in zip(*gradients, strict=True)),
        "moved": moved,
    }


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    # A ring, of which the schedules without chunks use the chain.
    groups = connect_edges(neighbours(build(INTERLEAVED)), "gloo", TIMEOUT_S, CPU)
    found: dict[str, dict[str, Any]] = {}
    for name, (made, transport) in CASES.items():
        schedule = made()
        check(schedule)
        model = Model(schedule.num_stages)
        engine = engine_of(schedule, rank, transport) if transport else None
        executor = Executor(schedule, rank, model.parts(schedule, rank), Edges(rank, groups, CPU))
        for _ in range(ITERATIONS):
            executor.run(engine)
        expected = in_one_piece(schedule.num_stages, schedule.num_microbatches, ITERATIONS)
        own = schedule.layout.stages_of(rank)
        same = all(torch.equal(model.weights[stage].grad, expected[stage]) for stage in own)  # type: ignore[arg-type]
        found[name] = {
            "same": same,
            "moved": sum(engine.moved_bytes.values()) if engine else 0,
            "hosts": engine.host_bytes if engine else 0,
        }
        if engine:
            engine.release()
    everybody = [tuple(range(RANKS))]
    shared = connect_shared(everybody, everybody, "gloo", TIMEOUT_S, CPU)
    for vocabulary in SPLIT:
        found[f"shards {vocabulary.value}"] = sharded(rank, groups, shared, vocabulary)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_processes(one_rank, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
