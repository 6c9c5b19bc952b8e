"""What a placement of our own changes in Megatron's answers; a process group is only a rank and a size here."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import training
from megatron.training.models import dist_utils
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch._C._distributed_c10d import HashStore

from bpipe.schedule.layout import Layout, one_pipe
from megatron.scheduling.hooks import patches, repairs
from megatron.scheduling.placement.chunks import (
    Refused,
    View,
    first_replicas,
    refuse_group,
    require_built_here,
    separate_copies,
    sum_gradients,
    wraps_of,
)
from megatron.scheduling.placement.positions import Positions

RANKS = 4


def rounds(*ways: int) -> Layout:
    """Chunks that go up the ranks (1) or down (-1)."""
    return one_pipe([rank for way in ways for rank in range(RANKS)[::way]])


V, WAVE, LOOPS = rounds(1, -1), rounds(1, -1, 1), rounds(1, 1)
# Two pipes: for Megatron, 4 ranks with two virtual stages each.
BOTH = Layout((tuple(range(8)), tuple(range(8))[::-1]))


class Ranks:
    """A process group that has only a rank and a size."""

    def __init__(self, rank: int, size: int = RANKS) -> None:
        self.rank, self.size = lambda: rank, lambda: size


class Chunk(torch.nn.Module):
    """A part of a model that records how it was built."""

    def __init__(self, pre_process: bool, post_process: bool, shared: bool = True, **built: Any) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = shared
        self.built = SimpleNamespace(**built)
        self.pg_collection: Any = None
        self.weight = torch.nn.Parameter(torch.randn(3, 2))
        self.weight.shared_embedding = True  # type: ignore[attr-defined]

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.weight


@contextlib.contextmanager
def of_rank(layout: Layout, rank: int) -> Iterator[SimpleNamespace]:
    """Make this process one of Megatron's pipeline ranks, with the placement's patches; yields its groups."""
    groups = SimpleNamespace(pp=Ranks(rank), tp=Ranks(0, 1))
    state = {
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": rank,
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": RANKS,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": layout.num_stages // RANKS,
    }
    with mock.patch.multiple(parallel_state, **state):
        installed = patches.install(wraps_of(Positions.of(layout)))
        try:
            yield groups
        finally:
            installed.remove()


def built(layout: Layout, rank: int, settings: TransformerConfig) -> list[Chunk]:
    """The chunks of one rank, built by Megatron's own function with the layers that Megatron counts for each."""

    def build(groups: Any, pre_process: bool, post_process: bool, vp_stage: int) -> Chunk:
        seen = groups.pp.rank()
        assert (
            parallel_state.get_pipeline_model_parallel_rank()
            == parallel_state.get_pipeline_model_parallel_group().rank()
            == seen
        )
        assert groups.tp is of.tp
        first = get_transformer_layer_offset(settings, vp_stage, seen)
        layers = range(first, first + get_num_layers_to_build(settings, vp_stage, seen))
        return Chunk(pre_process, post_process, layers=layers, stage=vp_stage * RANKS + seen)

    with of_rank(layout, rank) as of:
        chunks = dist_utils.build_virtual_pipeline_stages(build, of, layout.num_stages // RANKS)
        assert parallel_state.get_pipeline_model_parallel_rank() == rank, "outside of a build it is the rank again"
    # Although it was built with a view of the groups, a chunk communicates through the real ones.
    assert all(chunk.pg_collection is of for chunk in chunks)
    return chunks


def config(layout: Layout, **settings: Any) -> TransformerConfig:
    sizes = {"num_layers": 24, "hidden_size": 8, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    pipeline = {
        "pipeline_model_parallel_size": RANKS,
        "virtual_pipeline_model_parallel_size": layout.num_stages // RANKS,
    }
    return TransformerConfig(**{**sizes, **pipeline, **settings})


# Settings, and how many layers each stage of Megatron's own pipeline has with them.
EVEN: dict[str, Any] = {}
UNEVEN = {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 8}
COUNTED = {
    "num_layers": 22,
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
BY_HAND = {"num_layers": 10, "pipeline_model_parallel_layout": "Et|tt|t|t|t|t|t|ttL"}
CUTS: list[tuple[Layout, dict[str, Any], list[int]]] = [
    (V, EVEN, [3] * 8),
    (WAVE, EVEN, [2] * 12),
    (V, UNEVEN, [2, 3, 3, 4, 2, 3, 3, 4]),
    (V, COUNTED, [2, 3, 3, 3, 3, 3, 3, 2]),
    (V, BY_HAND, [1, 2, 1, 1, 1, 1, 1, 2]),
]


def check_every_stage_is_built_as_what_it_is() -> None:
    for layout, settings, sizes in CUTS:
        positions = Positions.of(layout)
        chunks = [built(layout, rank, config(layout, **settings)) for rank in range(RANKS)]
        last = layout.num_stages - 1
        by_stage = [
            chunks[positions.rank_at(position)][stage // RANKS] for stage, position in enumerate(layout.placements[0])
        ]
        assert [chunk.built.stage for chunk in by_stage] == list(range(layout.num_stages))
        assert [(chunk.pre_process, chunk.post_process) for chunk in by_stage] == [
            (stage == 0, stage == last) for stage in range(last + 1)
        ]
        assert [len(chunk.built.layers) for chunk in by_stage] == sizes, settings
        assert [layer for chunk in by_stage for layer in chunk.built.layers] == list(range(sum(sizes))), settings


def check_a_scripts_own_model_is_built_so_too() -> None:
    """`get_model` calls the script's function with keywords only, some of which are not ours."""

    def get_model(provider: Callable[..., Chunk], **keywords: Any) -> list[Chunk]:
        return [provider(pre_process=True, post_process=True, vp_stage=chunk, **keywords) for chunk in range(2)]

    def provider(pg_collection: Any, pre_process: bool, post_process: bool, vp_stage: int, config: str) -> Chunk:
        assert config == "a script's"
        return Chunk(pre_process, post_process, stage=vp_stage * RANKS + pg_collection.pp.rank())

    wrapped = wraps_of(Positions.of(V))[patches.GET_MODEL](get_model)
    for rank in range(RANKS):
        chunks = wrapped(provider, pg_collection=SimpleNamespace(pp=Ranks(rank)), config="a script's")
        assert [chunk.built.stage for chunk in chunks] == [RANKS - 1 - rank, RANKS + rank]
        assert [(chunk.pre_process, chunk.post_process) for chunk in chunks] == [(rank == 3, False), (False, rank == 3)]


def check_a_model_that_nobody_placed_is_refused() -> None:
    """A model that the user's own loop builds by itself would silently have its layers in another order."""
    chunks = built(V, 3, config(V))
    wrapped = [SimpleNamespace(module=SimpleNamespace(module=chunk)) for chunk in chunks]
    for models in (chunks, wrapped):
        require_built_here(Positions.of(V), models)
    with pytest.raises(ValueError, match=r"^chunk 1 of the model has the layers .* build"):
        require_built_here(Positions.of(V), [wrapped[0], SimpleNamespace(module=Chunk(False, True))])
    require_built_here(Positions.of(LOOPS), [Chunk(True, False), Chunk(False, True)])


def check_nothing_can_be_sent_in_a_view() -> None:
    view = View(1, RANKS)
    assert (view.rank(), view.size()) == (1, RANKS)
    with pytest.raises(AttributeError, match=r"a view of the pipeline has no allreduce: .* communicate through"):
        view.allreduce()  # type: ignore[operator]


def check_megatrons_own_placement_is_left_alone() -> None:
    assert wraps_of(Positions.of(LOOPS)) == {}
    # If the first and last stages are on different ranks, embeddings, data and checkpoints are where Megatron has them.
    of_a_wave = wraps_of(Positions.of(WAVE))
    assert patches.BUILD_CHUNKS in of_a_wave
    assert not {patches.EMBEDDING_RANKS, patches.TIED_GRADIENTS, patches.INITIALIZE} & set(of_a_wave)


def check_the_last_rank_has_the_first_stages_data() -> None:
    """The first rank also builds the data, to write its indices, and keeps its iterators only with packed rows."""
    asked: list[bool] = []

    def is_first() -> list[bool]:
        return [parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk) for chunk in range(2)]

    def build(build_train_valid_test_datasets_provider: str) -> Any:
        assert build_train_valid_test_datasets_provider == "sets"
        asked[:] = is_first()
        return ["of a chunk", "of another"], "one"

    for rank, packed in ((rank, packed) for rank in range(RANKS) for packed in (False, True)):
        with (
            mock.patch.object(training, "build_train_valid_test_data_iterators", build),
            mock.patch("megatron.training.get_args", lambda sft=packed: SimpleNamespace(sft=sft)),
            of_rank(V, rank),
        ):
            assert is_first() == [rank == 3, False]
            assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1) is (rank == 3)
            iterators = training.build_train_valid_test_data_iterators("sets")
            assert is_first() == [rank == 3, False]
        assert asked == [rank in (0, 3), False]
        none = rank == 0 and not packed
        assert iterators == (([None, None], None) if none else (["of a chunk", "of another"], "one"))


def check_a_chunk_that_computes_is_first_or_last_itself() -> None:
    """Upstream's pretrain_gpt.py asks without a stage: the last stage of a V received tokens without labels."""

    def ends(**stage: Any) -> tuple[bool, bool]:
        return parallel_state.is_pipeline_first_stage(**stage), parallel_state.is_pipeline_last_stage(**stage)

    def step(vp_stage: int | None) -> None:
        calls.append((ends(), is_first_or_last_pipeline_stage(vp_stage)))
        assert ends(ignore_virtual=False, vp_stage=last[1]) == (False, rank == 3), "the stage that is named"

    def compute(*arguments: Any, vp_stage: int | None, **_: Any) -> None:
        step(vp_stage)
        # The loss is computed inside a step, or after it with shards.
        schedules.forward_step_calc_loss(*["given"] * 4, vp_stage, *["given"] * 3)

    def calculate_loss(*arguments: Any) -> None:
        step(arguments[4])

    for layout, last in ((V, (3, 1)), (WAVE, (3, 2)), (BOTH, (3, 1))):
        first = (0 if layout is WAVE else 3, 0)
        for rank in range(RANKS):
            replaced = mock.patch.multiple(
                schedules,
                forward_step=functools.wraps(schedules.forward_step)(compute),
                forward_step_calc_loss=functools.wraps(schedules.forward_step_calc_loss)(calculate_loss),
            )
            with replaced, of_rank(layout, rank):
                outside = ends()
                for chunk in range(layout.num_stages // RANKS):
                    calls: list[tuple[tuple[bool, bool], bool]] = []
                    schedules.forward_step(*["given"] * 8, vp_stage=chunk)
                    end = (rank, chunk) == first, (rank, chunk) == last
                    assert calls == [(end, any(end))] * 2, (layout, rank, chunk)
                    assert ends() == outside == (rank == first[0], rank == last[0]), "the rank's again"


def check_two_pipes_read_each_their_samples() -> None:
    """The last of an odd number of chunks belongs to the other pipe, and reads what the other half's first one does."""

    def build(build_train_valid_test_datasets_provider: Any) -> Any:
        return parallel_state.get_data_parallel_rank()

    def provider(vp_stage: int | None = None) -> None:
        """Never called."""

    for own, read in ((4, [4, 5]), (5, [5, 4])):
        replicas = mock.patch.object(parallel_state, "get_data_parallel_group", return_value=Ranks(own))
        with mock.patch.object(training, "build_train_valid_test_data_iterators", build), of_rank(BOTH, 1), replicas:
            for chunk, replica in enumerate(read):
                assert (
                    training.build_train_valid_test_data_iterators(functools.partial(provider, vp_stage=chunk))
                    == replica
                )
                assert parallel_state.get_data_parallel_rank() == own
            with pytest.raises(ValueError, match="request the data of every chunk, by its vp_stage"):
                training.build_train_valid_test_data_iterators(provider)


PIPELINE = [2, 6, 10, 14]


def first_and_last(pp_ranks: list[int]) -> list[int]:
    return sorted({pp_ranks[0], pp_ranks[-1]})


def chosen(**choices: Callable[[list[int]], list[int]]) -> dict[str, list[int]]:
    """What Megatron's set-up of a V receives if a script passes these functions."""
    ranks_by_name: dict[str, list[int]] = {}

    def initialize(get_embedding_ranks: Any = None, get_position_embedding_ranks: Any = None) -> None:
        functions = {
            "get_embedding_ranks": get_embedding_ranks,
            "get_position_embedding_ranks": get_position_embedding_ranks,
        }
        ranks_by_name.update({name: function(PIPELINE) for name, function in functions.items() if function is not None})

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize), of_rank(V, 0):
        parallel_state.initialize_model_parallel(**choices)
    return ranks_by_name


def check_one_rank_has_both_embeddings() -> None:
    with of_rank(V, 0):
        assert parallel_state.default_embedding_ranks(PIPELINE) == [14]
        assert parallel_state.default_position_embedding_ranks(PIPELINE) == [14]
    assert parallel_state.default_embedding_ranks(PIPELINE) == [2, 14]


def check_it_takes_the_place_of_what_megatron_would_choose() -> None:
    """Upstream's pretrain_gpt.py passes the ranks of the first and last stages, so it could not train any V."""
    assert chosen(get_embedding_ranks=first_and_last) == {"get_embedding_ranks": [14]}
    assert chosen(get_embedding_ranks=lambda ranks: ranks[-1:]) == {"get_embedding_ranks": [14]}, (
        "a script that was written for a V"
    )
    assert chosen(get_position_embedding_ranks=lambda ranks: ranks[:1]) == {"get_position_embedding_ranks": [14]}


def check_another_choice_than_megatrons_is_refused_with_the_difference() -> None:
    refusal = (
        r"^get_embedding_ranks: in the pipeline of ranks 2, 6, 10, 14 the script chooses 6, 14, "
        r"where Megatron's own function chooses 2, 14\. In "
        r"this schedule rank 14 has .* leave get_embedding_ranks out, or use a schedule whose stages go round"
    )
    with pytest.raises(Refused, match=refusal):
        chosen(get_embedding_ranks=lambda ranks: ranks[1::2])
    with pytest.raises(Refused, match=r"chooses none, where"):
        chosen(get_embedding_ranks=lambda ranks: [])
    with pytest.raises(Refused, match=r"^get_position_embedding_ranks: .* chooses 2, 14, where Megatron's own .* 2\."):
        chosen(get_position_embedding_ranks=first_and_last)


def check_a_copy_that_the_script_leaves_out_must_not_be_there() -> None:
    """Upstream's script leaves out the last stage if no weight is tied; a tied one would diverge even in stock."""

    def initialize(get_embedding_ranks: Any, get_position_embedding_ranks: Any = None) -> None:
        assert get_embedding_ranks(PIPELINE) == [14]

    def provide(shared: bool) -> Callable[..., Chunk]:
        return lambda pg_collection, pre_process, post_process, vp_stage: Chunk(pre_process, post_process, shared)

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize), of_rank(V, 3) as groups:
        parallel_state.initialize_model_parallel(get_embedding_ranks=lambda ranks: ranks[:1])
        dist_utils.build_virtual_pipeline_stages(provide(shared=False), groups, 2)
        with pytest.raises(Refused, match=r"^get_embedding_ranks: .* only the first stage's rank, .* or untie them"):
            dist_utils.build_virtual_pipeline_stages(provide(shared=True), groups, 2)


def check_two_ranks_that_add_up_one_weight_are_refused() -> None:
    """With a script's own groups one rank of a V would wait for ever for the other."""
    both, alone, outside = (
        SimpleNamespace(pp=Ranks(3), tp=Ranks(0, 1), embd=embd) for embd in (Ranks(0, 2), Ranks(0, 1), -100)
    )
    refusal = r"^pg_collection\.embd: the script has 2 ranks sum .* last rank only, or None \(.*, or use a schedule"
    with pytest.raises(ValueError, match=refusal) as refused:
        refuse_group(Positions.of(V), both)
    assert not isinstance(refused.value, Refused), "ranks outside of the group do not see it, and go on"
    wrapped = wraps_of(Positions.of(V))[patches.GET_MODEL](
        lambda provider, **keywords: provider(vp_stage=0, **keywords)
    )
    with pytest.raises(ValueError, match=refusal):
        wrapped(lambda **keywords: pytest.fail("its constructor would wait"), pg_collection=both)
    for groups in (alone, outside, None):
        refuse_group(Positions.of(V), groups)
    refuse_group(Positions.of(WAVE), both)


def check_copies_of_a_tied_weight_stay_equal() -> None:
    chunks = built(V, 3, config(V))
    assert torch.equal(chunks[0].weight, chunks[1].weight)
    assert chunks[0].weight.data_ptr() != chunks[1].weight.data_ptr()
    alone = built(V, 0, config(V))
    assert not torch.equal(alone[0].weight, alone[1].weight), "neither is the first stage, nor the last"
    for name in ("main_grad", "grad"):
        for number, chunk in enumerate(chunks):
            setattr(chunk.weight, name, torch.full((3, 2), 1.0 + number))
        sum_gradients(*chunks)
        assert all(torch.equal(getattr(chunk.weight, name), torch.full((3, 2), 3.0)) for chunk in chunks), name
        for chunk in chunks:
            delattr(chunk.weight, name) if name == "main_grad" else setattr(chunk.weight, name, None)
    sum_gradients(*chunks)
    assert chunks[0].weight.grad is None, "frozen weights have no gradients"
    for first, last in (
        (Chunk(True, False, shared=False), Chunk(False, True, shared=False)),
        (Chunk(False, False), Chunk(False, True)),
    ):
        first.weight.grad, last.weight.grad = torch.ones(3, 2), torch.ones(3, 2)
        sum_gradients(first, last)
        assert torch.equal(first.weight.grad, torch.ones(3, 2)), "two weights of their own"


def check_a_copy_is_saved_once_and_loaded_apart() -> None:
    def shard(replica: int) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("word_embeddings", torch.zeros(4, 2), replica_id=(0, replica, 0))

    state = {"first": {"weight": shard(0)}, "last": {"weight": shard(1)}, "step": 3}
    for order in (state, dict(reversed(state.items()))):
        kept = first_replicas(order)
        assert isinstance(kept["first"]["weight"], ShardedTensor)
        assert not isinstance(kept["last"]["weight"], ShardedTensor)
        assert kept["step"] == 3
    weight = torch.arange(4.0)
    apart = separate_copies({"first": weight, "last": weight, "empty": [weight[:0], weight[:0]], "step": 3})
    assert torch.equal(apart["first"], apart["last"])
    assert apart["first"].data_ptr() != apart["last"].data_ptr()
    assert apart["step"] == 3


def check_state_after_a_padded_bucket_is_saved_as_its_own() -> None:
    """Three parameters are in two buckets, the first of which is padded from 5 to 8."""
    buckets = [SimpleNamespace(numel_unpadded=5), SimpleNamespace(numel_unpadded=3)]
    buffer = SimpleNamespace(
        buckets=buckets,
        bucket_indices=[(0, 8), (8, 12)],
        param_index_map={"a": (0, 2, 0), "b": (2, 5, 0), "c": (8, 11, 1)},
    )
    assert repairs.without_padding(buffer) == {"a": (0, 2, 0), "b": (2, 5, 0), "c": (5, 8, 1)}
    mended = DistributedOptimizer.sharded_param_state_fully_reshardable
    assert repairs._cuts_as_with_padding(mended.__wrapped__), "the defect is gone: so may its repair"
    assert not repairs._cuts_as_with_padding(mended)


def check_a_repair_whose_stand_in_lacks_what_a_newer_megatron_reads_is_left_out() -> None:
    """0.20's function reads `grad_data`: every run ended there with an AttributeError, even without --bpipe."""

    def newer(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        return self.buffers[0].buckets[0].grad_data.numel()

    last = repairs.REPAIRS[-1:]
    with (
        mock.patch.object(DistributedOptimizer, last[0].names[0].rpartition(".")[2], newer),
        mock.patch.object(repairs, "REPAIRS", last),
    ):
        (line,) = repairs.apply()
        assert DistributedOptimizer.sharded_param_state_fully_reshardable is newer
    assert line.startswith("repair skipped, because it cannot be tried on this Megatron (AttributeError: "), line
    assert "'grad_data'" in line


def check_state_that_is_filed_by_rank_is_refused() -> None:
    wraps = wraps_of(Positions.of(V))
    outcomes = {
        "torch": pytest.raises(ValueError, match="has the format torch, which stores weights by rank"),
        "torch_dist": contextlib.nullcontext(),
    }
    for form, outcome in outcomes.items():
        with outcome:
            assert wraps[patches.CHECKPOINT_FORMAT](lambda name, args, form=form: form)("iter_1", None) == "torch_dist"
    for patch in (patches.STATE_BY_BUFFER, patches.STATE_BY_RANK):
        with pytest.raises(ValueError, match=r"save it there with --dist-ckpt-optim-fully-reshardable, or continue"):
            wraps[patch](print)("self", {}, True)


def setup() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
