"""Build and feed a rank's chunks if a placement is not Megatron's own.

Model, data, embeddings and checkpoints are those of the same stages under Megatron's own placement. A chunk that counts its
stages from the other end of the pipeline is built with a view of the pipeline's group in which the ranks are mirrored;
communication keeps the true group.
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

from bpipe.config.features.table import Settings
from megatron.scheduling.hooks import patches
from megatron.scheduling.placement import checkpoints, embeddings
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
        self._script = embeddings.Script()
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
            **checkpoints.BY_LAYER,
        }
        if self._positions.folded:
            wraps |= {
                patches.INITIALIZE: patches.replaced_by(self._initialize),
                patches.EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, embeddings.CHOICES[0]),
                patches.POSITION_EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, embeddings.CHOICES[1]),
                patches.DATA_ITERATORS: patches.replaced_by(self._build_data_iterators),
                patches.TIED_GRADIENTS: patches.replaced_by(_sum_tied_gradients),
                **checkpoints.ONCE,
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
        for name in embeddings.CHOICES:
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
        embeddings.refuse_group(self._positions, groups)
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
                embeddings.fill_copy(self._first, model)
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
    embeddings.sum_gradients(model[0], model[-1])
