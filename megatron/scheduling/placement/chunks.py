"""Build and feed a rank's chunks where a placement is not Megatron's own.

In: which chunks count their stages from the other end of the pipeline, and which pipe each serves. Out: wrappers of
Megatron's functions, with which its model, data, embeddings and checkpoints are those of the same stages under its own
placement. A chunk that counts from the other end is built with a view of the pipeline's group in which the ranks are
mirrored; whatever communicates keeps the true group. Knows no schedule: who computes what and when is nobody's concern
here.
"""

from __future__ import annotations

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

from bpipe.config.features.feature import Settings
from megatron.scheduling.hooks import patches
from megatron.scheduling.placement import embedding_ranks, tied_checkpoints, tied_weights
from megatron.scheduling.placement.positions import Positions


class View:
    """The pipeline's group as a chunk sees it that counts its ranks from the other end. Nothing can be sent in it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a view of the pipeline has no {name}: it only counts layers; communicate through the model's own "
            "pg_collection.pp"
        )


class Placed:
    """The wrappers, for pipelines whose chunks do not all count as Megatron's do."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        # The chunk that is being built, or asked about: as which Megatron sees this rank.
        self._chunk: int | None = None
        # The chunk that computes.
        self._computing: int | None = None
        self._indexing = False
        self._first: Any = None
        self._script = embedding_ranks.Script()
        # Megatron's own choices of ranks with embeddings, by the names under which a script gives its own.
        self._own: dict[str, Callable[..., list[int]]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return what to put in place of what."""
        wraps: dict[patches.Patch, patches.Wrap] = {
            patches.PIPELINE_GROUP: self._wrap_group,
            patches.PIPELINE_RANK: self._wrap_rank,
            patches.BUILD_CHUNKS: self._wrap_build_chunks,
            patches.GET_MODEL: self._wrap_get_model,
            patches.LAYERS_BEFORE: self._wrap_layers,
            patches.LAYERS_TO_BUILD: self._wrap_layers,
            patches.SEGMENT: _wrap_segment,
            patches.FORWARD_STEP: patches.by_name(self._compute),
            patches.CALCULATE_LOSS: patches.by_name(self._compute),
            patches.FIRST_STAGE: self._wrap_first_stage,
            patches.LAST_STAGE: self._of_chunk,
            **BY_LAYER,
        }
        if self._positions.folded:
            wraps |= {
                patches.INITIALIZE: self._wrap_initialize,
                patches.EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, embedding_ranks.CHOICES[0]),
                patches.POSITION_EMBEDDING_RANKS: functools.partial(self._wrap_own_choice, embedding_ranks.CHOICES[1]),
                patches.DATA_ITERATORS: self._wrap_data_iterators,
                patches.TIED_GRADIENTS: _wrap_tied_gradients,
                **ONCE,
            }
        return wraps

    # -- which rank a chunk sees
    # ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _seen_by(self, chunk: int | None) -> Iterator[None]:
        """Inside, Megatron's answers are for this chunk; None: for the rank, as always."""
        kept, self._chunk = self._chunk, chunk
        try:
            yield
        finally:
            self._chunk = kept

    def _view(self, group: Any, chunk: int) -> Any:
        return (
            View(self._positions.seen(group.rank(), chunk), group.size()) if self._positions.mirrored[chunk] else group
        )

    def _wrap_group(self, get_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_group)
        def group(check_initialized: bool = True) -> Any:
            found = get_group(check_initialized)
            return found if self._chunk is None else self._view(found, self._chunk)

        return group

    def _wrap_rank(self, get_rank: Callable[[], int]) -> Callable[[], int]:
        @functools.wraps(get_rank)
        def rank() -> int:
            chunk = self._chunk
            with self._seen_by(None):
                found = get_rank()
            return found if chunk is None else self._positions.seen(found, chunk)

        return rank

    def _wrap_layers(self, count: Callable[..., int]) -> Callable[..., int]:
        """With a layout of layers Megatron asks which rank this is wherever it counts, not only while it builds."""

        @functools.wraps(count)
        def counted(
            layout: Any, layer_type: Any = None, vp_stage: int | None = None, pp_rank: int | None = None
        ) -> int:
            given = {} if layer_type is None else {"layer_type": layer_type}
            with self._seen_by(vp_stage or 0):
                return count(layout, **given, vp_stage=vp_stage, pp_rank=pp_rank)

        return counted

    def _wrap_initialize(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Let what a script says of embeddings be judged where Megatron asks: it knows by then which ranks a
        pipeline has."""
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def initialized(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            for name in embedding_ranks.CHOICES:
                if given.arguments.get(name) is not None:
                    given.arguments[name] = self._script.replaced(name, given.arguments[name], self._own[name])
            initialize(*given.args, **given.kwargs)

        return initialized

    def _wrap_own_choice(self, name: str, choose: Callable[..., list[int]]) -> Callable[..., list[int]]:
        self._own[name] = choose
        return embedding_ranks.last_rank(choose)

    # -- models
    # ------------------------------------------------------------------------------------------------------------------

    def _wrap_build_chunks(self, build_chunks: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build_chunks)
        def built(build_model_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def make(pg_collection: Any, **given: Any) -> Any:
                return self._build(lambda view, **flags: build_model_func(view, **flags), pg_collection, given)

            return build_chunks(make, *args, **kwargs)

        return built

    def _wrap_get_model(self, get_model: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_model)
        def got(model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def provide(pg_collection: Any, **given: Any) -> Any:
                return self._build(
                    lambda view, **flags: model_provider_func(pg_collection=view, **flags), pg_collection, given
                )

            return get_model(provide, *args, **kwargs)

        return got

    def _build(self, make: Callable[..., Any], groups: Any, given: dict[str, Any]) -> Any:
        """One chunk, as the stage that it is. `make` takes the groups to build with, and Megatron's flags."""
        embedding_ranks.refuse_group(self._positions, groups)
        chunk, last = given["vp_stage"], len(self._positions.mirrored) - 1
        seen = self._positions.seen(groups.pp.rank(), chunk)
        given |= {
            "pre_process": chunk == seen == 0,
            "post_process": (chunk, seen) == (last, self._positions.pipeline_size - 1),
        }
        with self._seen_by(chunk):
            view = copy.copy(groups)
            view.pp = self._view(groups.pp, chunk)
            model = make(view, **given)
        self._script.check(model)
        # What is inside goes on counting layers with the view; the trainer communicates in the model's own.
        model.pg_collection = groups
        setattr(model, _BUILT_HERE, True)
        if chunk == 0:
            self._first = model
        if chunk == last:
            if self._positions.folded:
                tied_weights.fill(self._first, model)
            self._first = None
        return model

    # -- computing
    # -------------------------------------------------------------------------------------------------------------

    def _compute(self, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Remember the chunk while its forward or its loss is computed."""
        kept, self._computing = self._computing, arguments["vp_stage"]
        try:
            return run()
        finally:
            self._computing = kept

    def _of_chunk(self, is_end: Callable[..., bool]) -> Callable[..., bool]:
        """Answer a question that names no stage for the chunk that computes.

        Megatron answers it for the rank: in its own placements no rank has both ends of the pipeline.
        """

        @functools.wraps(is_end)
        def asked(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            if vp_stage is None and self._computing is not None:
                ignore_virtual, vp_stage = False, self._computing
            return is_end(ignore_virtual, vp_stage)

        return asked

    # -- data
    # ------------------------------------------------------------------------------------------------------------------

    def _wrap_first_stage(self, is_first: Callable[..., bool]) -> Callable[..., bool]:
        @self._of_chunk
        @functools.wraps(is_first)
        def first(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            with self._seen_by(0):
                found = is_first(ignore_virtual, vp_stage)
            return found or (self._indexing and is_first(ignore_virtual, vp_stage))

        return first

    def _wrap_data_iterators(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Rank 0 of the world writes the indices that all others read, and says whether there is anything to train on.

        So it builds data sets too, as it does where it has the first stage, and then has no use for them, unless every
        stage reads where packed sequences end. Of two pipes each chunk reads the samples of the one that it serves.
        """

        @functools.wraps(build)
        def built(provider: Any) -> Any:
            self._indexing = True
            try:
                with self._reading(provider):
                    found = build(provider)
            finally:
                self._indexing = False
            if parallel_state.get_pipeline_model_parallel_rank() > 0 or _packed():
                return found
            return tuple([None] * len(each) if isinstance(each, list) else None for each in found)

        return built

    @contextlib.contextmanager
    def _reading(self, provider: Any) -> Iterator[None]:
        """Inside, samplers are made for the replica whose samples this provider's chunk reads."""
        if not self._positions.pipes:
            yield
            return
        # Megatron asks for the sets of one chunk after the other.
        chunk = getattr(provider, "keywords", {}).get("vp_stage")
        if chunk is None:
            raise ValueError(
                "with two pipes each chunk reads different samples: request the data of every chunk, by its vp_stage"
            )
        parallel_state.set_data_parallel_rank(
            self._positions.replica_of(parallel_state.get_data_parallel_rank(), chunk)
        )
        try:
            yield
        finally:
            parallel_state.set_data_parallel_rank(None)


def wraps_of(positions: Positions) -> dict[patches.Patch, patches.Wrap]:
    """Return what to put in place of what, before any model is built; nothing where every stage is where Megatron
    has it."""
    return {} if positions.native else Placed(positions).wraps()


# What is set on a model that was built as the stage that it is.
_BUILT_HERE = "bpipe_built_as_its_stage"


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


def _wrap_segment(select: Callable[..., Any]) -> Callable[..., Any]:
    """Deal a hybrid model's pattern out by stage: Megatron asks `torch.distributed` which rank of the group this is,
    and that knows no view."""
    signature = inspect.signature(select)

    @functools.wraps(select)
    def selected(*args: Any, **kwargs: Any) -> Any:
        group = signature.bind(*args, **kwargs).arguments["pp_group"]
        if not isinstance(group, View):
            return select(*args, **kwargs)

        def seen(ask: Callable[..., int], answer: Callable[[], int]) -> Callable[..., int]:
            return lambda of=None: answer() if of is group else ask(of)

        with (
            patch.object(dist, "get_rank", seen(dist.get_rank, group.rank)),
            patch.object(dist, "get_world_size", seen(dist.get_world_size, group.size)),
        ):
            return select(*args, **kwargs)

    return selected


def _packed() -> bool:
    """Return whether rows are several sequences, by Megatron's flags."""
    from megatron.training import get_args

    given = Settings(get_args())
    return bool(given.sft or given.dataloader_inter_document_masking)


def _wrap_tied_gradients(all_reduce: Callable[..., None]) -> Callable[..., None]:
    """Where Megatron adds up the copies' gradients: behind their reduction, before they are scaled."""

    @functools.wraps(all_reduce)
    def added(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        all_reduce(model, *args, **kwargs)
        tied_weights.add_up(model[0], model[-1])

    return added


def _wrap_save(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return save(tied_checkpoints.first_replicas(sharded_state_dict), *args, **kwargs)

    return saved


def _wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        # Asked to, it also says which keys did not match.
        return (
            (tied_checkpoints.separate_copies(found[0]), *found[1:])
            if isinstance(found, tuple)
            else tied_checkpoints.separate_copies(found)
        )

    return loaded


def _refuse_files_by_rank(get_format: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(get_format)
    def checked(checkpoint_name: Any, args: Any) -> str:
        found = get_format(checkpoint_name, args)
        if found != "torch_dist":
            raise ValueError(
                f"{checkpoint_name} has the format {found}, which stores weights by rank, but here ranks have "
                "different weights from the run that saved it: convert it there with --ckpt-convert-format "
                "torch_dist --ckpt-convert-save FOLDER"
            )
        return found

    return checked


def _refuse_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """State that is filed by buffer or by rank says nothing of which weights it belongs to, and here they are
    others'."""

    @functools.wraps(method)
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "this checkpoint stores the distributed optimizer's state by the buffers of each rank, but here ranks "
            "have different weights from the run that saved it: save it there with "
            "--dist-ckpt-optim-fully-reshardable, or continue without it with --no-load-optim"
        )

    return refuse


# Where a rank may have a weight, or a part of it, twice.
ONCE: dict[patches.Patch, patches.Wrap] = {patches.SAVE: _wrap_save, patches.LOAD: _wrap_load}

# Where ranks have other weights than without our flags, a checkpoint must say of each which it is.
BY_LAYER: dict[patches.Patch, patches.Wrap] = {
    patches.CHECKPOINT_FORMAT: _refuse_files_by_rank,
    patches.STATE_BY_BUFFER: _refuse_state,
    patches.STATE_BY_RANK: _refuse_state,
}
