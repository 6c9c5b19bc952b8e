"""Hold the switches of a training that decide how long it takes and what it holds, each named as Megatron's flag.

In: yes or no.

A switch stands here once: commands offer it, launches are read and written with it, predictions ask it. Knows no sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


def _switch(text: str) -> bool:
    """One that is off unless it is said; `text` is the help of the commands."""
    switch: bool = field(default=False, metadata={"help": text})
    return switch


@dataclass(frozen=True, slots=True)
class Switches:
    overlap_grad_reduce: bool = _switch("overlap the reduction of gradients with computation")
    overlap_param_gather: bool = _switch("overlap the gathering of updated weights with the next forwards")
    no_overlap_p2p_communication: bool = _switch("Megatron's interleaved loop waits for its messages between stages")
    tp_comm_overlap: bool = _switch(
        "with sequence parallelism: Transformer Engine overlaps gathers and scatters with matrix products, part by part"
    )
    bpipe_differing_sizes: bool = _switch("micro-batches may differ in size, so host buffers are an eighth larger")
    accumulate_allreduce_grads_in_fp32: bool = _switch("with fp16: sum and reduce gradients in 32 bits instead of 16")
    grad_reduce_in_bf16: bool = _switch("with bf16: sum and reduce gradients in 16 bits instead of 32")
    attention_softmax_in_fp32: bool = _switch(
        "without flash attention: a softmax in 32 bits, which is saved as well where its kernels are not fused"
    )
    no_masked_softmax_fusion: bool = _switch(
        "without flash attention: the softmax by separate kernels, which take longer"
    )

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("--overlap-param-gather needs --overlap-grad-reduce: give both")

    def check(self, precision: str, *, distributed_optimizer: bool, sequence_parallel: bool) -> None:
        """Raise ValueError for a switch of what the training does not do.

        `sequence_parallel`: True without tensor parallelism.
        """
        if self.overlap_param_gather and not distributed_optimizer:
            raise ValueError(
                "--overlap-param-gather needs the distributed optimizer, which gathers weights: give that, too, or "
                "leave this out"
            )
        if self.grad_reduce_in_bf16 and precision != "bf16":
            raise ValueError(f"--grad-reduce-in-bf16 is for bf16, the precision is {precision}: leave it out")
        if self.tp_comm_overlap and not sequence_parallel:
            raise ValueError(
                "--tp-comm-overlap is for sequence parallelism, whose gathers and scatters it cuts: leave one of the "
                "two out"
            )

    def with_overlaps(self, *, distributed_optimizer: bool) -> Switches:
        """Return them with gradients reduced and, if the optimizer is distributed, weights gathered next to
        computation."""
        return replace(self, overlap_grad_reduce=True, overlap_param_gather=distributed_optimizer)

    @property
    def flags(self) -> tuple[str, ...]:
        """Switches that are on, as Megatron's flags."""
        return tuple(flag_of(name) for name in SWITCHES if getattr(self, name))


SWITCHES = tuple(one.name for one in fields(Switches))
HELP: dict[str, str] = {one.name: one.metadata["help"] for one in fields(Switches)}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
