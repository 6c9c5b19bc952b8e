"""Translate the layers of every stage to Megatron's flags and back.

Megatron has four ways to give them: equal chunks, numbers for the first and the last rank, the embedding and the loss
counted as layers, and a layout that lists every stage. A test holds both directions to Megatron's own layers.
"""

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import argument_of
from bpipe.predict.layer_variants import MOST_LAYERS
from bpipe.predict.layout import without_layers

LAYERS_OF_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
COUNT_EMBEDDING, COUNT_LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"


def given(args: Options, *flags: str) -> list[Any]:
    """Return the values of flags: None or False where one is not given."""
    return [getattr(args, argument_of(flag)) for flag in flags]


def check_split(args: Options) -> None:
    """Raise ValueError for flags that exclude each other."""
    layers_of_a_chunk, chunks, layout = given(args, LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT)
    if [layers_of_a_chunk, chunks, layout].count(None) < 2:
        raise ValueError(f"{LAYERS_OF_A_CHUNK}, {CHUNKS} and {LAYOUT} exclude each other: give one of them")
    ends, counted = any(given(args, FIRST, LAST)), any(given(args, COUNT_EMBEDDING, COUNT_LOSS))
    if ends and counted:
        raise ValueError(f"{FIRST} / {LAST} and {COUNT_EMBEDDING} / {COUNT_LOSS} exclude each other: give either")
    if layout is not None and (ends or counted):
        raise ValueError(
            f"{LAYOUT} says where every layer is: drop {FIRST}, {LAST}, {COUNT_EMBEDDING} and {COUNT_LOSS}"
        )
    if ends and layers_of_a_chunk is not None:
        raise ValueError(f"with {FIRST} / {LAST} Megatron needs {CHUNKS} instead of {LAYERS_OF_A_CHUNK}")


def split_flags(layers: tuple[int, ...], pipeline: int, further: int = 0, mtp_stage: int | None = None) -> list[str]:
    """Return the shortest flags for these layers, none if there is one stage per rank and all are equal.

    Stage s is on rank s % p. So many layers predict `further` tokens on `mtp_stage`, by default the last.
    """
    chunks = len(layers) // pipeline
    text = layout_text(layers, further, mtp_stage)
    if not layers[-1] or mtp_stage is not None:
        return [LAYOUT, text]
    if len(set(layers)) == 1:
        return [LAYERS_OF_A_CHUNK, str(layers[0])] if chunks > 1 else []
    ends = _first_and_last(layers, pipeline)
    if ends is not None and chunks == 1:
        return ends
    for embedding, loss in ((1, 1), (1, 0), (0, 1)):
        whole = (layers[0] + embedding, *layers[1:-1], layers[-1] + loss)
        if len(set(whole)) == 1:
            # With one stage per rank, numbers for the ends came first.
            return [LAYERS_OF_A_CHUNK, str(whole[0]), *[COUNT_EMBEDDING] * embedding, *[COUNT_LOSS] * loss]
    return ends or [LAYOUT, text]


def _first_and_last(layers: tuple[int, ...], pipeline: int) -> list[str] | None:
    """Return flags for the first and last rank, if each rank's chunks are equal and so are the ranks between."""
    if (
        pipeline < 2
        or any(len(set(layers[rank::pipeline])) > 1 for rank in range(pipeline))
        or len(set(layers[1 : pipeline - 1])) > 1
    ):
        return None
    chunks = len(layers) // pipeline
    first, last = layers[0] * chunks, layers[pipeline - 1] * chunks
    return [*([CHUNKS, str(chunks)] if chunks > 1 else []), FIRST, str(first), LAST, str(last)]


def layout_text(layers: tuple[int, ...], further: int = 0, mtp_stage: int | None = None) -> str:
    """Write a layout such as `Et*3|(t*4|)*6t*3mL`. The last stage may have only the output layer."""
    stages = [_repeated("t", num) for num in layers]
    stages[-1 if mtp_stage is None else mtp_stage] += _repeated("m", further)
    if len(stages) == 1:
        return f"E{stages[0]}L"
    inner = ""
    for stage, run in groupby(stages[1:-1]):
        count = len(list(run))
        inner += f"{stage}|" * count if count < 3 else f"({stage}|)*{count}"
    return f"E{stages[0]}|{inner}{stages[-1]}L"


def _repeated(symbol: str, number: int) -> str:
    return symbol if number == 1 else f"{symbol}*{number}" if number else ""


def read_split(args: Options) -> tuple[int, ...]:
    """Return the layers of every stage as Megatron places them. Raises ValueError for what it would refuse."""
    check_split(args)
    layers_of_a_chunk, chunks, layout = given(args, LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT)
    if layout is not None:
        return _read_layout(layout, args)
    ranks = _rank_layers(args)
    chunks = chunks or 1
    if layers_of_a_chunk is not None:
        if ranks[0] % layers_of_a_chunk:
            raise ValueError(f"{LAYERS_OF_A_CHUNK} {layers_of_a_chunk} does not divide the {ranks[0]} layers of a rank")
        chunks = ranks[0] // layers_of_a_chunk
    for rank, num in enumerate(ranks):
        if num % chunks:
            raise ValueError(f"{CHUNKS} {chunks} does not divide the {num} layers of rank {rank}")
    layers = [num // chunks for num in ranks] * chunks
    count_embedding, count_loss = given(args, COUNT_EMBEDDING, COUNT_LOSS)
    layers[0] -= count_embedding
    layers[-1] -= count_loss
    refuse_empty(layers)
    return tuple(layers)


def _rank_layers(args: Options) -> list[int]:
    """Return the layers of every rank, with embedding and loss if they count as layers."""
    first, last = ([] if end is None else [end] for end in given(args, FIRST, LAST))
    counted = [flag for flag in (COUNT_EMBEDDING, COUNT_LOSS) if any(given(args, flag))]
    left = args.num_layers - sum(first) - sum(last) + len(counted)
    ranks = args.pipeline_model_parallel_size - len(first) - len(last)
    if ranks < 0 or left < 0 or (not ranks and left) or (ranks and left % ranks):
        flags = [f"{flag} {value}" for flag, values in ((FIRST, first), (LAST, last)) for value in values] + counted
        besides = f" with {' '.join(flags)}" if flags else f": say how with {FIRST} and {LAST}, or {LAYOUT}"
        raise ValueError(
            f"--num-layers {args.num_layers} cannot be divided evenly over --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}{besides}"
        )
    return [*first, *([left // ranks] * ranks if ranks else []), *last]


def further_stage(layout: str | None) -> int | None:
    """Return the stage of a layout that predicts further tokens; None: the last one, or there are none."""
    stages = [] if layout is None else _spelled(layout).split("|")
    return next((stage for stage, layers in enumerate(stages[:-1]) if "m" in layers), None)


def _spelled(text: str) -> str:
    """Return a layout with all its repetitions."""
    if len(text) > MOST_LAYERS:
        raise ValueError(f"{LAYOUT} {text[:40]}... has {len(text)} characters, but a layout has at most {MOST_LAYERS}")
    spelled = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        lengths = [
            len(match[1]) * int(match[2]) if len(match[2]) < 6 else math.inf for match in re.finditer(repeated, spelled)
        ]
        # Every layer may be followed by a |.
        if sum(lengths) > 2 * MOST_LAYERS:
            raise ValueError(f"{LAYOUT} {text[:40]} repeats more than {MOST_LAYERS} layers, the most of a model")
        spelled = re.sub(repeated, lambda match: match[1] * int(match[2]), spelled)
    return spelled


def _read_layout(text: str, args: Options) -> tuple[int, ...]:
    spelled, further = _spelled(text), args.mtp_num_layers or 0
    if not re.fullmatch(r"E[t|]*m*\|?L", spelled):
        raise ValueError(
            f"{LAYOUT} {text[:60]}: give one E first, then t for every layer with | between stages, m for every further "
            "token, all on the last stage or the one before, and one L last"
        )
    if spelled.count("m") != further:
        raise ValueError(
            f"{LAYOUT} {text[:60]} has {spelled.count('m')} layers for further tokens (m), but --mtp-num-layers is "
            f"{further or 'not given'}"
        )
    layers = [stage.count("t") for stage in spelled.split("|")]
    if len(layers) % args.pipeline_model_parallel_size:
        ranks = f"the {args.pipeline_model_parallel_size} ranks"
        raise ValueError(f"{LAYOUT} {text[:60]} has {len(layers)} stages, not a multiple of {ranks}")
    if sum(layers) != args.num_layers:
        raise ValueError(f"{LAYOUT} {text[:60]} has {sum(layers)} layers, but --num-layers is {args.num_layers}")
    refuse_empty(layers, further_stage(text))
    return tuple(layers)


def refuse_empty(layers: Sequence[int], mtp_stage: int | None = None) -> None:
    """Raise ValueError for a stage without a layer that needs one."""
    empty = without_layers(layers, mtp_stage)
    if empty is not None:
        raise ValueError(f"stage {empty} has no layer, which is modelled of the first and the last stage only")
