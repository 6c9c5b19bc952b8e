"""Build and feed a rank's chunks if a placement is not Megatron's own.

Model, data, embeddings and checkpoints are those of the same stages under Megatron's own placement. A chunk that counts its
stages from the other end of the pipeline is built with a view of the pipeline's group in which the ranks are mirrored;
communication keeps the true group.

In a V one rank has the first stage and the last, and with them both copies of a tied weight, whose gradients Megatron sums
in an all-reduce of two ranks. So it must be the only rank with embeddings, whatever a script chooses, or the other would be
waited for in vain. It fills the second copy from the first and sums their gradients itself: two numbers have one sum, so the
bits are the same. It saves each shard of such a weight, and of the optimizer's state, once, and no two loaded tensors share
memory; between two ranks Megatron's own rules ensure both.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.utils import get_attr_wrapped_model

from bpipe.config.features.table import Settings
from megatron.scheduling.hooks import patches
from megatron.scheduling.placement.positions import Positions

# Is set on a model that was built as its stage.
_BUILT_HERE = "bpipe_built_as_its_stage"


class View:
    """The pipeline's group as seen by a chunk that counts its ranks from the other end. Nothing can be sent in it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a view of the pipeline has no {name}: it only counts layers; communicate through the model's own "
            "pg_collection.pp"
        )


class Placed:
    """Wrappers for pipelines whose chunks do not all count as Megatron's do."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        # The chunk that is being built, or asked about: Megatron takes this rank for the chunk's.
        self._chunk: int | None = None
        # The chunk that computes.
        self._computing: int | None = None
        self._indexing = False
        self._first: Any = None
        self._script = Script()
        # Megatron's own choices of ranks with embeddings, by the names of the arguments for a script's own.
        self._own: dict[str, Callable[..., list[int]]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        wraps: dict[patches.Patch, patches.Wrap] = {
            patches.PIPELINE_GROUP: patches.replaced_by(self._group),
            patches.PIPELINE_RANK: patches.replaced_by(self._rank),
            patches.BUILD_CHUNKS: patches.replaced_by(self._build_chunks),
            patches.GET_MODEL: patches.replaced_by(self._get_model),
            patches.LAYERS_BEFORE: patches.replaced_by(self._count_layers),
            patches.LAYERS_TO_BUILD: patches.replaced_by(self._count_layers),
            patches.SEGMENT: patches.by_name(_select_segment),
            patches.FORWARD_STEP: patches.by_name(self._compute),
            patches.CALCULATE_LOSS: patches.by_name(self._compute),
            patches.FIRST_STAGE: patches.replaced_by(self._is_first),
            patches.LAST_STAGE: patches.replaced_by(self._is_end),
            **BY_LAYER,
        }
        if self._positions.folded:
            wraps |= {
                patches.INITIALIZE: patches.replaced_by(self._initialize),
                patches.EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, CHOICES[0]),
                patches.POSITION_EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, CHOICES[1]),
                patches.DATA_ITERATORS: patches.replaced_by(self._build_data_iterators),
                patches.TIED_GRADIENTS: patches.replaced_by(_sum_tied_gradients),
                **ONCE,
            }
        return wraps

    @contextlib.contextmanager
    def _seen_by(self, chunk: int | None) -> Iterator[None]:
        """Let Megatron answer for a chunk; None: for the rank, as always."""
        kept, self._chunk = self._chunk, chunk
        try:
            yield
        finally:
            self._chunk = kept

    def _view(self, group: Any, chunk: int) -> Any:
        if not self._positions.mirrored[chunk]:
            return group
        return View(self._positions.seen(group.rank(), chunk), group.size())

    def _group(self, get_group: Callable[..., Any], check_initialized: bool = True) -> Any:
        group = get_group(check_initialized)
        return group if self._chunk is None else self._view(group, self._chunk)

    def _rank(self, get_rank: Callable[[], int]) -> int:
        chunk = self._chunk
        with self._seen_by(None):
            rank = get_rank()
        return rank if chunk is None else self._positions.seen(rank, chunk)

    def _count_layers(
        self,
        count: Callable[..., int],
        layout: Any,
        layer_type: Any = None,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """With a layout of layers Megatron asks which rank this is whenever it counts, not only while it builds."""
        kind = {} if layer_type is None else {"layer_type": layer_type}
        with self._seen_by(vp_stage or 0):
            return count(layout, **kind, vp_stage=vp_stage, pp_rank=pp_rank)

    def _initialize(self, initialize: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Check a script's choice of embedding ranks when Megatron asks for it: then a pipeline's ranks are known."""
        call = inspect.signature(initialize).bind(*args, **kwargs)
        for name in CHOICES:
            if call.arguments.get(name) is not None:
                call.arguments[name] = self._script.replaced(name, call.arguments[name], self._own[name])
        initialize(*call.args, **call.kwargs)

    def _wrap_own_choice(self, name: str, choose: Callable[..., list[int]]) -> Callable[..., list[int]]:
        """Choose Megatron's last rank in place of its own choice: it has the first stage and the last."""
        self._own[name] = choose
        return patches.replaced_by(lambda _, pp_ranks: [pp_ranks[-1]])(choose)

    def _build_chunks(
        self, build_chunks: Callable[..., Any], build_model_func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def build(pg_collection: Any, **flags: Any) -> Any:
            return self._build(build_model_func, pg_collection, flags)

        return build_chunks(build, *args, **kwargs)

    def _get_model(
        self, get_model: Callable[..., Any], model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def provide(pg_collection: Any, **flags: Any) -> Any:
            return self._build(
                lambda view, **flags: model_provider_func(pg_collection=view, **flags), pg_collection, flags
            )

        return get_model(provide, *args, **kwargs)

    def _build(self, build: Callable[..., Any], groups: Any, flags: dict[str, Any]) -> Any:
        """Build one chunk as its stage. `build` gets the groups to build with, and Megatron's flags."""
        refuse_group(self._positions, groups)
        chunk, last = flags["vp_stage"], len(self._positions.mirrored) - 1
        seen = self._positions.seen(groups.pp.rank(), chunk)
        flags |= {
            "pre_process": chunk == seen == 0,
            "post_process": (chunk, seen) == (last, self._positions.pipeline_size - 1),
        }
        with self._seen_by(chunk):
            view = copy.copy(groups)
            view.pp = self._view(groups.pp, chunk)
            model = build(view, **flags)
        self._script.check(model)
        # The model's parts go on counting layers with the view; the trainer communicates in the model's own groups.
        model.pg_collection = groups
        setattr(model, _BUILT_HERE, True)
        if chunk == 0:
            self._first = model
        if chunk == last:
            if self._positions.folded:
                fill_copy(self._first, model)
            self._first = None
        return model

    def _compute(self, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Remember the chunk while its forward or its loss is computed."""
        kept, self._computing = self._computing, arguments["vp_stage"]
        try:
            return run()
        finally:
            self._computing = kept

    def _is_end(self, is_end: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        """Answer a question without a stage for the chunk that computes.

        Megatron answers it for the rank: in its own placements no rank has both ends of the pipeline.
        """
        if vp_stage is None and self._computing is not None:
            ignore_virtual, vp_stage = False, self._computing
        return is_end(ignore_virtual, vp_stage)

    def _is_first(self, is_first: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        with self._seen_by(0):
            first = self._is_end(is_first, *args, **kwargs)
        return first or (self._indexing and self._is_end(is_first, *args, **kwargs))

    def _build_data_iterators(self, build: Callable[..., Any], provider: Any) -> Any:
        """Build data sets on rank 0 of the world too, which writes the indices that all others read.

        It has the first stage in Megatron's own placement. Here it has no use for the data, unless every stage reads
        where packed sequences end. With two pipes each chunk reads the samples of its own pipe.
        """
        with patch.object(self, "_indexing", True), self._reading(provider):
            iterators = build(provider)
        if parallel_state.get_pipeline_model_parallel_rank() > 0 or _packed():
            return iterators
        return tuple([None] * len(kind) if isinstance(kind, list) else None for kind in iterators)

    @contextlib.contextmanager
    def _reading(self, provider: Any) -> Iterator[None]:
        """Make samplers for the replica whose samples this provider's chunk reads."""
        if not self._positions.pipes:
            yield
            return
        # Megatron asks for the sets of one chunk after the other.
        chunk = getattr(provider, "keywords", {}).get("vp_stage")
        if chunk is None:
            raise ValueError(
                "with two pipes each chunk reads different samples: request the data of every chunk, by its vp_stage"
            )
        replica = self._positions.replica_of(parallel_state.get_data_parallel_rank(), chunk)
        parallel_state.set_data_parallel_rank(replica)
        try:
            yield
        finally:
            parallel_state.set_data_parallel_rank(None)


def wraps_of(positions: Positions) -> dict[patches.Patch, patches.Wrap]:
    """Return the patches of a placement, which are needed before any model is built; none for Megatron's own."""
    return {} if positions.native else Placed(positions).wraps()


def require_built_here(positions: Positions, models: Sequence[Any]) -> None:
    """Raise ValueError for models that were built without the placement, and so have other stages' layers."""
    if positions.native:
        return
    for chunk, model in enumerate(models):
        inner = model
        while not hasattr(inner, _BUILT_HERE) and hasattr(inner, "module"):
            inner = inner.module
        if not hasattr(inner, _BUILT_HERE):
            raise ValueError(
                f"chunk {chunk} of the model has the layers that Megatron's own placement gives this rank, but the "
                "schedule places others there: build it with megatron.training.training.get_model or "
                "megatron.training.models, after install(), or use a schedule whose stages go round the ranks, such "
                "as grouped-interleaved"
            )


def _select_segment(arguments: Mapping[str, Any], select: Callable[[], Any]) -> Any:
    """Deal a hybrid model's pattern out by stage: Megatron asks `torch.distributed` for the rank in the group, which
    knows no view."""
    group = arguments["pp_group"]
    if not isinstance(group, View):
        return select()

    def seen(ask: Callable[..., int], answer: Callable[[], int]) -> Callable[..., int]:
        return lambda of=None: answer() if of is group else ask(of)

    with (
        patch.object(dist, "get_rank", seen(dist.get_rank, group.rank)),
        patch.object(dist, "get_world_size", seen(dist.get_world_size, group.size)),
    ):
        return select()


def _packed() -> bool:
    """Whether rows are several sequences, by Megatron's flags."""
    from megatron.training import get_args

    settings = Settings(get_args())
    return bool(settings.sft or settings.dataloader_inter_document_masking)


def _sum_tied_gradients(
    all_reduce: Callable[..., None], model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Run where Megatron sums the copies' gradients: after their reduction, before they are scaled."""
    all_reduce(model, *args, **kwargs)
    sum_gradients(model[0], model[-1])


EMBEDDINGS = "get_embedding_ranks"
CHOICES = (EMBEDDINGS, "get_position_embedding_ranks")
Choose = Callable[[list[int]], list[int]]
_WAY_OUT = "or use a schedule whose stages go round the ranks, such as --bpipe-schedule grouped-interleaved"


class Refused(ValueError):
    """A script's choice of embedding ranks cannot be kept, which every rank finds out alike."""


class Script:
    """One script's choice of embedding ranks, until its models are built."""

    def __init__(self) -> None:
        # Whether it left the output layer's copy out, which is right only if no weight is shared.
        self._leaves_out_copy = False

    def replaced(self, name: str, choose: Choose, own: Choose) -> Choose:
        """Return a function that chooses the last rank alone, in place of what a script gives Megatron as `name`.

        `own` is Megatron's function for it. The new function raises Refused if the script's choice differs from
        Megatron's. Two others are accepted: upstream's pretrain_gpt.py leaves the last stage out if no weight is tied,
        and a script that was written for a V may choose the last rank itself.
        """

        @functools.wraps(choose)
        def ranks(pp_ranks: list[int]) -> list[int]:
            chosen, usual, last = set(choose(pp_ranks)), set(own(pp_ranks)), pp_ranks[-1]
            if name == EMBEDDINGS and chosen == {pp_ranks[0]}:
                self._leaves_out_copy = True
            elif chosen not in (usual, {last}):
                raise Refused(
                    f"{name}: in the pipeline of ranks {_listed(pp_ranks)} the script chooses {_listed(chosen)}, where "
                    f"Megatron's own function chooses {_listed(usual)}. In this schedule rank {last} has both the "
                    f"first and the last stage and replaces Megatron's own choice, but no other: leave {name} out, "
                    f"{_WAY_OUT}"
                )
            return [last]

        return ranks

    def check(self, model: Any) -> None:
        """Raise Refused for a model with a copy that the script trains separately: here both would be kept equal."""
        ahead = getattr(getattr(model, "config", None), "mtp_num_layers", None)
        if self._leaves_out_copy and (getattr(model, "share_embeddings_and_output_weights", False) or ahead):
            raise Refused(
                f"{EMBEDDINGS}: the script chooses only the first stage's rank, but the model has the embedding's "
                "weight in its last stage too: give the ranks of both, as Megatron's own function does, or untie "
                "them (--untie-embeddings-and-output-weights)"
            )


def refuse_group(positions: Positions, groups: Any) -> None:
    """Raise ValueError if the script's own process groups have one of several ranks for the embedding's weight.

    Only the ranks of that group notice, so it is no `Refused`.
    """
    group: Any = getattr(groups, "embd", None)
    # A rank outside of the group has a number in its place.
    size = group.size() if hasattr(group, "size") else 1
    if positions.folded and size > 1:
        raise ValueError(
            f"pg_collection.embd: the script has {size} ranks sum the gradients of the embedding and the output "
            "layer, but where one rank has both the first and the last stage, as in a V, it has both copies: make "
            "it a group of the pipeline's last rank only, or None (as Megatron's own is if install() runs before "
            f"process groups are made), {_WAY_OUT}"
        )


def _listed(ranks: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, ranks if isinstance(ranks, list) else sorted(ranks))) or "none"


def fill_copy(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Copy the first chunk's weight to the last, if the two are tied and of this rank.

    Both must be new, without wrappers.
    """
    weights = _copies(first, last)
    if weights is not None:
        # Buckets of the distributed optimizer have these alone, so a rank's share is the same part of both.
        unmarked = [weight for weight in weights if not getattr(weight, "shared_embedding", False)]
        assert not unmarked, "Megatron marks both copies as shared"
        weights[1].data.copy_(weights[0].data)


def sum_gradients(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Give both copies the sum of their gradients, if they are tied, of this rank, and not frozen."""
    weights = _copies(*(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in (first, last)))
    if weights is None:
        return
    gradients = [weight.main_grad if hasattr(weight, "main_grad") else weight.grad for weight in weights]
    if any(gradient is None for gradient in gradients):
        return
    gradients[0].add_(gradients[1])
    gradients[1].copy_(gradients[0])


def _copies(first: Any, last: Any) -> tuple[Any, Any] | None:
    """Return the copy of the first stage and that of the last, or of the layers that predict further tokens."""
    predicts_further = getattr(last, "mtp_process", False)
    if not first.pre_process or not (last.post_process or predicts_further):
        return None
    if not last.share_embeddings_and_output_weights and not predicts_further:
        return None
    copy = last.shared_embedding_or_output_weight()
    # An output layer in shards has none: `vocabulary.output_shards`.
    return None if copy is None else (first.shared_embedding_or_output_weight(), copy)


def first_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state to save: of shards that this rank has several times only the first replica.

    A fully parallel save would take all of them for the main one, and refuse to write one place of a file twice.
    """
    kept: dict[Any, ShardedTensor] = {}
    for leaf in nested_values(state):
        # Pieces are made only when they are saved, all at once; another leaf of the same pieces is left out.
        for shard in nested_values([leaf.build()]) if isinstance(leaf, ShardedTensorFactory) else (leaf,):
            if isinstance(shard, ShardedTensor):
                first = kept.setdefault(_place_of(shard), shard)
                if shard.replica_id < first.replica_id:
                    kept[_place_of(shard)] = shard

    def single(leaf: Any) -> Any:
        twin = isinstance(leaf, ShardedTensor) and kept[_place_of(leaf)] is not leaf
        return LocalNonpersistentObject(None) if twin else leaf

    return dict_list_map_outplace(single, state)  # type: ignore[no-any-return]


def _place_of(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)


def separate_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return the loaded state, with memory of its own for every tensor.

    A fully parallel load gives the copies of a shard one tensor, which an optimizer keeps: it would update the moments of
    both copies in the same memory, twice per step.
    """
    seen: set[tuple[int, torch.Size]] = set()

    def separate(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        memory = leaf.data_ptr(), leaf.shape
        if memory in seen:
            return leaf.clone()
        seen.add(memory)
        return leaf

    return dict_list_map_outplace(separate, state)  # type: ignore[no-any-return]


def _load(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = load(*args, **kwargs)
    # On request it also returns which keys did not match.
    return (separate_copies(state[0]), *state[1:]) if isinstance(state, tuple) else separate_copies(state)


def _refuse_files_by_rank(get_format: Callable[..., str], checkpoint_name: Any, args: Any) -> str:
    form = get_format(checkpoint_name, args)
    if form != "torch_dist":
        raise ValueError(
            f"{checkpoint_name} has the format {form}, which stores weights by rank, but here ranks have "
            "different weights from the run that saved it: convert it there with --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER"
        )
    return form


def _refuse_state(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "this checkpoint stores the distributed optimizer's state by the buffers of each rank, but here ranks "
        "have different weights from the run that saved it: save it there with "
        "--dist-ckpt-optim-fully-reshardable, or continue without it with --no-load-optim"
    )


# For a rank that may have a weight, or a part of it, twice.
ONCE: dict[patches.Patch, patches.Wrap] = {
    patches.SAVE: patches.replaced_by(
        lambda save, sharded_state_dict, *args, **kwargs: save(first_replicas(sharded_state_dict), *args, **kwargs)
    ),
    patches.LOAD: patches.replaced_by(_load),
}
# If ranks have other weights than without our flags, a checkpoint must store each weight by its name.
BY_LAYER: dict[patches.Patch, patches.Wrap] = {
    patches.CHECKPOINT_FORMAT: patches.replaced_by(_refuse_files_by_rank),
    patches.STATE_BY_BUFFER: patches.replaced_by(_refuse_state),
    patches.STATE_BY_RANK: patches.replaced_by(_refuse_state),
}
