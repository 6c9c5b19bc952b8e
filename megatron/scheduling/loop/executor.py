"""Run our own loop in place of Megatron's: any schedule, by Megatron's own steps, for training and for evaluation.

What Megatron's loops do around their steps, such as synchronising and finalising gradients, is done by calling Megatron's
functions for it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from bpipe.build import ScheduleConfig
from bpipe.config.features.queries import reasons_of
from bpipe.config.features.table import SHARDED, SLICED, Settings
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.shards import EarlyShard, OutputShard
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.lowering.forward_only import forwards_only
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.collectives import (
    INPUT_SORTS,
    SORTS,
    Collectives,
    SecondStep,
    SharedGroups,
    connect_shared,
)
from bpipe.transport.distributed import gathered
from bpipe.transport.edges import Edge, Edges, connect_edges
from bpipe.transport.streams import CopyLane, beside
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.chunks import Call, ChunkStages, RankPart
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.grad_sync import Marks, Syncing
from megatron.scheduling.loop.halves import delaying
from megatron.scheduling.loop.megatron_loops import as_list, group_of, no_barrier
from megatron.scheduling.options.arguments import SchedulingConfig, end_where
from megatron.scheduling.placement.chunks import refuse_group, require_built_here
from megatron.scheduling.slices.stages import SlicedShardedStages, SlicedStages
from megatron.scheduling.vocabulary.input_shards import Inputs
from megatron.scheduling.vocabulary.output_shards import Splitting, output_shard
from megatron.scheduling.vocabulary.sharded_stages import FurtherLosses, ShardedStages

# The process groups for finalising gradients, and for the embedding's deferred ones.
_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]


@dataclass
class _Prepared:
    """A program that is ready to run: of one schedule and one size of micro-batches, forwards only or not."""

    executor: Executor
    stages: ChunkStages
    marks: Marks


class Loop:
    """Runs in place of Megatron's pipelined loops."""

    def __init__(self, driver: Driver, config: SchedulingConfig) -> None:
        self._driver = driver
        assert config.own is not None, "a schedule for our own loop"
        self._own = config.own
        self._num_pipes = config.own.layout.num_pipes
        self._config = config
        self._slicing, self._halves = driver.slicing, driver.halves
        self._prepared: dict[object, _Prepared] = {}
        self._groups: Any = None
        self._shared: SharedGroups | None = None
        self._lane: CopyLane | None = None

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return replacements of Megatron's loops. Its steps are called, so only their signatures are checked."""
        loops = patches.ONE_F_ONE_B, patches.INTERLEAVED, patches.NO_PIPELINING
        wraps: dict[patches.Patch, patches.Wrap] = dict.fromkeys(loops, patches.replaced_by(self._run))
        wraps |= dict.fromkeys(patches.LEAVES, lambda step: step)
        if self._own.splits:
            wraps |= self._halves.wraps()
        if self._own.vocabulary is not Vocabulary.WHOLE:
            wraps |= Splitting(self._config.positions, self._own.input_shards).wraps() | FurtherLosses().wraps()
        return wraps if self._slicing is None else wraps | self._slicing.wraps()

    def close(self, failed: bool) -> None:
        """End the loop: training is over or has failed. The driver destroys its groups."""
        self._halves.abandon()
        if self._lane is not None:
            # Its work is done, or it waits for ranks that are gone.
            self._lane.close(wait=False)

    def _run(
        self,
        _: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        **further: Any,
    ) -> Any:
        """Run one call of a loop. `p2p_communicator` is not used: messages have groups of their own.

        Raises ValueError for an argument of a later Megatron, because it would have no effect.
        """
        if further:
            raise ValueError(
                f"our own loop does not support {', '.join(further)}, which this Megatron passes to its loops; train "
                "without --bpipe-schedule"
            )
        models = as_list(model)
        config = get_model_config(models[0])
        if adjust_tensor_shapes_fn is not None or (
            pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection)
        ):
            raise ValueError(
                "our own loop passes stage outputs unchanged, between stages of one model: it supports neither "
                "adjust_tensor_shapes_fn nor a pipeline of several modules; train without --bpipe-schedule"
            )
        self._refuse_lengths(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        refuse_group(self._config.positions, groups)
        call = Call(
            config=config,
            models=models,
            data=as_list(data_iterator),
            forward_step_func=forward_step_func,
            num_microbatches=num_microbatches,
            cp_size=groups.cp.size(),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        sizes = seq_length, micro_batch_size, decoder_seq_length
        if self._slicing is not None:
            self._slicing.begin(seq_length, config)
        if forward_only:
            number = num_microbatches * self._num_pipes * self._own.slices
            prepared = self._prepare(
                (num_microbatches, *sizes), lambda: forwards_only(self._own.layout, number), models
            )
            with _timed(config), _within(prepared.stages, call):
                prepared.executor.run()
            return call.losses
        program = self._program(num_microbatches, config)
        with self._driver.iteration(program, config) as schedule:
            prepared = self._prepare((program, *sizes), lambda: schedule, models)
            with no_barrier(config) if self._driver.changed_over else contextlib.nullcontext(), _timed(config):
                self._train(prepared, call, config, groups, force_all_reduce)
        return call.losses

    def _train(self, prepared: _Prepared, call: Call, config: Any, groups: Any, force_all_reduce: bool | None) -> None:
        last = prepared.stages.has_last
        finalize = config.finalize_model_grads_func
        embedding = (
            schedules.clear_embedding_activation_buffer(config, call.models, last) if finalize is not None else None
        )
        syncing = Syncing(prepared.marks, config, call.models)
        with _within(prepared.stages, call):
            self._halves.begin(
                {stage: delaying(call.models[chunk].modules()) for stage, chunk in prepared.stages.chunks.items()}
            )
            syncing.begin()
            try:
                prepared.executor.run(_Around(self._driver, syncing, prepared.stages))
                prepared.stages.check()
            finally:
                syncing.end()
        if finalize is not None:
            schedules.finish_embedding_wgrad_compute(config, embedding, last, groups.tp)
            num_tokens = call.num_tokens if config.calculate_per_token_loss else None
            finalize(call.models, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce)

    def _program(self, num_microbatches: int, config: Any) -> ScheduleConfig:
        """Return the program of an iteration; Megatron's own schedule has Megatron's groups, as in its own loop.

        Megatron counts one pipe's micro-batches.
        """
        own = replace(self._own, num_microbatches=num_microbatches * self._num_pipes, balance=self._driver.balance)
        family = None if own.written is not None else FAMILIES[own.schedule]
        # Fewer sliced micro-batches fill a group, and Megatron's default is for whole ones.
        if family is None or family.exchange is Exchange.POSTED or own.slices > 1:
            return own
        return replace(own, group_size=group_of(config, family, own.num_ranks))

    def _refuse_lengths(self, config: Any) -> None:
        """Raise ValueError for micro-batches or logits that are cut, if sequences differ in length or tokens further ahead
        are predicted: Megatron's arguments do not always say so."""
        cut = {
            "--bpipe-vocabulary": (self._own.vocabulary is not Vocabulary.WHOLE, SHARDED),
            "--bpipe-slices": (self._own.slices > 1, SLICED),
        }
        settings = Settings(config)
        lengths = SimpleNamespace(
            variable_seq_lengths=settings.variable_seq_lengths,
            mtp_num_layers=settings.mtp_num_layers,
            bpipe_slices=self._own.slices,
        )
        end_where([line for flag, (is_cut, rows) in cut.items() if is_cut for line in reasons_of(rows, lengths, flag)])

    def _prepare(
        self, key: object, schedule_of: Callable[[], Schedule], models: Sequence[torch.nn.Module]
    ) -> _Prepared:
        """Return a program, which is made at its first call. Collective over the world the first time."""
        prepared = self._prepared.get(key)
        if prepared is None:
            schedule, rank = schedule_of(), self._driver.rank
            if self._groups is None:
                require_built_here(self._config.positions, models)
                self._groups = self._connect_neighbours(schedule)
                self._driver.add_connections(self._groups.values())
            own = schedule.layout.stages_of(rank)
            order = [action for slot in schedule.ranks[rank] for action in slot.computations]
            part = RankPart(
                chunks={stage: chunk for chunk, stage in enumerate(own)},
                last_stage=schedule.num_stages - 1,
                split={action.key for action in order if action.kind is Kind.BACKWARD_WEIGHT},
                halves=self._halves,
                numbers=self._num_pipes * self._own.slices,
            )
            lengths = bool(Settings(get_model_config(models[0])).variable_seq_lengths)
            edges = Edges(rank, self._groups, self._driver.device, self._own.slices, differing=lengths)
            stages: ChunkStages
            if schedule.layout.vocabulary is Vocabulary.WHOLE:
                stages = ChunkStages(part) if self._slicing is None else SlicedStages(self._slicing, part)
                executor = Executor(schedule, rank, stages, edges)
            else:
                stages = sharded = self._sharded(part, models)
                carried = self._collectives(schedule, sharded.shard, edges)
                executor = Executor(schedule, rank, stages, carried, sharded.shard, sharded.inputs)
            prepared = self._prepared[key] = _Prepared(
                executor, stages, Marks.of(order, stages.chunks, self._num_pipes)
            )
        return prepared

    def _connect_neighbours(self, schedule: Schedule) -> dict[int, Edge]:
        """Return this rank's edges by the position of the neighbour. Collective over the world."""
        rank, device, ways = dist.get_rank(), self._driver.device, self._config.positions.pipelines()
        ends = ((way[low], way[high]) for way in ways for low, high in neighbours(schedule))
        pairs = sorted((min(both), max(both)) for both in ends)
        edges = connect_edges(pairs, _backend(device), self._config.message_timeout_s, device)
        pipeline = next(way for way in ways if rank in way)
        return {pipeline.index(neighbour): edge for neighbour, edge in edges.items()}

    def _connect_shards(self) -> SharedGroups:
        """Return this rank's groups with all ranks that share a vocabulary. Collective over the world."""
        timeout_s, device, ways = (
            self._config.message_timeout_s,
            self._driver.device,
            self._config.positions.pipelines(),
        )
        # With tensor parallelism the ranks of several pipelines.
        own = tuple(sorted(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())))
        sorts = (*SORTS, *INPUT_SORTS) if self._own.input_shards else SORTS
        return connect_shared(ways, sorted(set(gathered(own))), _backend(device), timeout_s, device, sorts)

    def _sharded(self, part: RankPart, models: Sequence[torch.nn.Module]) -> ShardedStages:
        """Return the stages of a rank with its shard of the output layer, and of the embedding."""
        layer, early = output_shard(models[-1]), self._own.vocabulary is Vocabulary.TWO
        if self._slicing is not None:
            return SlicedShardedStages(self._slicing, part, layer, early)
        inputs = Inputs.of(models, self._config.positions.rank_at(0)) if self._own.input_shards else None
        return ShardedStages(part, layer, early, inputs)

    def _collectives(self, schedule: Schedule, shard: OutputShard, edges: Edges) -> Collectives:
        """Return the messages of a rank with shards. Collective over the world the first time."""
        device = self._driver.device
        if self._shared is None:
            self._shared = self._connect_shards()
            self._driver.add_connections([self._shared])
        second = None
        if isinstance(shard, EarlyShard):
            self._lane = self._lane or beside(device, self._config.message_timeout_s)
            second = SecondStep(shard.late, self._lane)
        slices = schedule.layout.slices
        return Collectives(
            self._driver.rank, self._shared, schedule.layout.rank_of_action, device, second, slices, edges
        )


class _Around:
    """Calls of the driver and of the synchronisation around the computations of a training iteration."""

    def __init__(self, driver: Driver, syncing: Syncing, stages: ChunkStages) -> None:
        self._driver, self._syncing, self._stages = driver, syncing, stages
        self.sent, self.communicated, self.end = driver.sent, driver.communicated, driver.end

    def begin(self) -> None:
        if isinstance(self._stages, ShardedStages):
            shard = self._stages.shard
            self._driver.begin(lambda action: shard.storages(action.microbatch))
        else:
            self._driver.begin()

    def before(self, op: Action) -> None:
        self._syncing.before(op)
        self._driver.before(op)

    def after(
        self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        self._driver.after(op, outputs, inputs)
        self._syncing.after(op)


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Time the block with Megatron's forward-backward timer, if there are timers."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()


@contextlib.contextmanager
def _within(stages: ChunkStages, call: Call) -> Iterator[None]:
    """Compute for a call of the loop; nothing of it is kept afterwards."""
    stages.begin(call)
    try:
        yield
    finally:
        stages.begin(None)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"
