"""MLPs: what they save, their temporaries and seconds. Their matrices are in `predict.matmul`."""

from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import layer_products
from bpipe.predict.sizes import KERNEL_S, Rates, Saved, element_bytes, kept_bytes, num_tokens, shard_size

# Of a forward's: two products and what is between.
MLP_KERNELS = 3


def mlp_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what fused kernels save of an MLP, without the norm's output."""
    model, tokens = setup.model, num_tokens(setup)
    second = kept_bytes(setup, tokens * model.ffn_hidden_size, setup.tensor)
    return (
        Saved("input of the activation function", _inside_size(setup, model.first_mlp_size)),
        Saved("input of the second MLP matrix", second),
    )


def local_mlp_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what torch's own kernels save of an MLP, without the norm's output."""
    inner = _inside_size(setup, setup.model.ffn_hidden_size)
    if setup.model.gated:
        # SiLU of one half, the other half plus its offset of zero, and their product.
        return (Saved("both halves of the MLP", 2 * inner), Saved("SiLU, other half, product", inner, 3))
    return (Saved("GELU input and output", inner, 2),)


def mlp_after_input(setup: Setup) -> tuple[Saved, ...]:
    """Return what an MLP holds between dgrad and wgrad, without the input of its first matrix."""
    model = setup.model
    return (
        Saved("input of the second MLP matrix", _inside_size(setup, model.ffn_hidden_size)),
        Saved("gradient of the activation function's input", _inside_size(setup, model.first_mlp_size)),
        Saved("gradient behind the second MLP matrix", element_bytes(setup) * num_tokens(setup) * model.hidden_size),
    )


def mlp_working_bytes(setup: Setup) -> int:
    """Return the gradients of an MLP's inside."""
    return _inside_size(setup, setup.model.first_mlp_size + setup.model.ffn_hidden_size)


def mlp_touched_bytes(setup: Setup) -> float:
    """Return bytes that an MLP's activation function reads and writes."""
    sizes = setup.model.first_mlp_size + setup.model.ffn_hidden_size
    return element_bytes(setup) * num_tokens(setup) * sizes / setup.tensor


def mlp_forward_s(setup: Setup, kind: LayerKind) -> float:
    """Return seconds of an MLP's forward, without its norm."""
    products = layer_products(setup, kind)
    return (
        products.entering[-1].forward_s
        + products.returning[-1].forward_s
        + mlp_touched_bytes(setup) / Rates.of(setup).memory
        + MLP_KERNELS * KERNEL_S
    )


def _inside_size(setup: Setup, size: int) -> int:
    return shard_size(element_bytes(setup) * num_tokens(setup) * size, setup.tensor)
