"""Give the last stage fewer layers, because its output layer takes as long as several.

This sets Megatron's --pipeline-model-parallel-layout, before Megatron validates it. It needs no loop of ours, so it is the
baseline for splitting the output layer. Imports no Megatron.
"""

from collections.abc import Iterator
from typing import Any

from bpipe.config.launch.layer_split import (
    CHUNKS,
    COUNT_EMBEDDING,
    COUNT_LOSS,
    FIRST,
    LAST,
    LAYERS_OF_A_CHUNK,
    LAYOUT,
    layout_text,
)
from bpipe.predict.layer_counts import output_in_layers, padded_vocabulary, redistribute_layers
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import REDISTRIBUTE
from megatron.scheduling.hooks import upstream

_WANTED = f"--bpipe-vocabulary {REDISTRIBUTE}"


def redistribute(args: Any) -> None:
    """Choose the layout and log it once; equal layers are left. Raises ValueError with a line per reason."""
    upstream.require(args, "redistribution")
    problems = list(_problems(args))
    if problems:
        raise ValueError("\n  ".join(f"{_WANTED}: {problem}" for problem in problems))
    vocabulary = args.padded_vocab_size or padded_vocabulary(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    worth = output_in_layers(int(vocabulary), args.hidden_size, args.seq_length)
    num_stages = args.pipeline_model_parallel_size
    layers = redistribute_layers(args.num_layers, num_stages, worth)
    if layers is None:
        raise ValueError(
            f"{_WANTED}: {args.num_layers} layers are fewer than the {num_stages - 1} stages that would share them: "
            "drop the flag"
        )
    cost = f"{_WANTED}: the output layer takes as long as {worth:.1f} layers"
    if len(set(layers)) == 1:
        upstream.remark(f"{cost}, and the last stage keeps its own")
        return
    layout = layout_text(layers)
    # A checkpoint of such a run has the same layout.
    if args.pipeline_model_parallel_layout not in (None, layout):
        raise ValueError(
            f"{_WANTED}: {LAYOUT} {args.pipeline_model_parallel_layout} already places every layer: drop one of them"
        )
    args.pipeline_model_parallel_layout = layout
    upstream.remark(f"{cost}, so stages have {', '.join(map(str, layers))}: {LAYOUT} {layout}")


def _problems(args: Any) -> Iterator[str]:
    if args.pipeline_model_parallel_size < 2:
        yield "a pipeline of one rank has no other rank to take layers: drop the flag"
    uneven = {
        FIRST: args.decoder_first_pipeline_num_layers,
        LAST: args.decoder_last_pipeline_num_layers,
        COUNT_EMBEDDING: args.account_for_embedding_in_pipeline_split,
        COUNT_LOSS: args.account_for_loss_in_pipeline_split,
    }
    for flag, value in uneven.items():
        if value:
            yield f"{flag} also sets how many layers a stage has: drop one of them"
    chunks = (args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank)
    for flag, value in zip((LAYERS_OF_A_CHUNK, CHUNKS), chunks, strict=True):
        if value:
            remedy = "drop one of them, or split the output layer"
            yield f"{flag}: it does not work with several stages per rank; {remedy}"
    if args.mtp_num_layers:
        yield (
            "the last stage also has the layers that predict further tokens, which are not counted: drop "
            "--mtp-num-layers, or give a layout"
        )
    if args.hybrid_layer_pattern:
        yield "--hybrid-layer-pattern itself says where stages begin: move its | further back instead"
    family = FAMILIES.get(args.bpipe_schedule)
    if family is not None and (family.min_chunks > 1 or family.num_pipes > 1):
        yield f"--bpipe-schedule {family.name} has several stages per rank and its own layout: drop one of them"
    sizes = {"--num-layers": args.num_layers, "--hidden-size": args.hidden_size, "--seq-length": args.seq_length}
    sizes["--vocab-size"] = args.padded_vocab_size or args.vocab_size
    missing = [flag for flag, value in sizes.items() if not value]
    if missing:
        yield f"the cost of the output layer depends on {', '.join(missing)}, which is not given: add it"
