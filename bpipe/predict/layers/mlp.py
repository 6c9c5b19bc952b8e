"""MLPs and experts in their place: what they save, their temporaries and seconds. Matrices are in `predict.matmul`.

Experts are as in Megatron's `MoELayer`. A router scores every token for every expert; tokens are copied into the order of
their experts and sent there; each expert is an MLP whose output is weighted by the score before its second matrix. With
kernels `gpu` experts are Transformer Engine's grouped matrices with a fused weighted SwiGLU; with `cpu` they are MLPs one
after the other, and every step keeps its own. Loads are taken to be even.
"""

from bpipe.predict.exchanges import exchange, local_tokens, routed_tokens
from bpipe.predict.layer_variants import Experts, LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import layer_products, shared_products
from bpipe.predict.sizes import KERNEL_S, Rates, Saved, element_bytes, kept_bytes, num_tokens, sent_bytes, shard_size

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


# Putting tokens in the order of their experts and back: copied to be sent, sorted there, sorted back, and summed, each
# read and written.
ORDERINGS = 8
ROUTING_KERNELS = 30
# Scores are 32 bit, numbers of tokens and experts 64 bit.
SCORE_BYTES, NUMBER_BYTES = 4, 8


def experts_again(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> float:
    """Return seconds of recomputed forwards of a layer's experts: all between the norm and the sum, or parts."""
    memory, inside, seconds = Rates.of(setup).memory, experts_touched_bytes(setup), 0.0
    if "moe" in modules:
        products = layer_products(setup, kind)
        seconds += products.entering[-1].forward_s + products.returning[-1].forward_s + inside / memory
        return seconds + 2 * exchange(setup).seconds + (MLP_KERNELS + ROUTING_KERNELS) * KERNEL_S
    beside = shared_inside_bytes(setup)
    if "moe_act" in modules:
        # Tokens stay in the order in which they are.
        ordered = ORDERINGS * element_bytes(setup) * routed_tokens(setup) * setup.model.hidden_size
        seconds += (inside - beside - ordered) / memory + KERNEL_S
    if "shared_experts" in modules:
        seconds += (
            sum(product.forward_s for product in shared_products(setup)) + beside / memory + MLP_KERNELS * KERNEL_S
        )
    return seconds


def shared_inside_bytes(setup: Setup) -> float:
    """Return bytes that the experts that all tokens go to read and write between their matrices."""
    gates, experts = 2 if setup.model.gated else 1, setup.model.experts
    assert experts is not None
    return element_bytes(setup) * num_tokens(setup) * (1 + gates) * experts.shared_size / setup.tensor


def experts_saved(setup: Setup, recomputed: frozenset[str] = frozenset()) -> tuple[Saved, ...]:
    """Return what router and experts save, without the norm's output. `recomputed`: parts recomputed."""
    experts = setup.model.experts
    assert experts is not None
    if "moe" in recomputed:
        return ()
    beside = () if "shared_experts" in recomputed else _shared_experts(setup, experts)
    tokens, gates = element_bytes(setup) * routed_tokens(setup), 2 if setup.model.gated else 1
    inner = shard_size(tokens * experts.ffn_hidden_size, setup.expert_tensor)
    rows = (
        *_router(setup, experts),
        Saved("inputs of experts", kept_bytes(setup, routed_tokens(setup) * setup.model.hidden_size, 1)),
        Saved("inputs of experts' activation functions", gates * inner),
    )
    if setup.kernels == "gpu":
        second = kept_bytes(setup, routed_tokens(setup) * experts.ffn_hidden_size, setup.expert_tensor)
        rows += () if "moe_act" in recomputed else (Saved("inputs of experts' second matrices", second),)
        return (*rows, *beside)
    inside = (
        "SiLU, other half, product, weighed product of experts" if setup.model.gated else "GELU of experts, weighed"
    )
    return (*rows, Saved(inside, inner, 4 if setup.model.gated else 2), *beside)


def _router(setup: Setup, experts: Experts) -> tuple[Saved, ...]:
    """Return the scores, weights and order of tokens."""
    tokens = local_tokens(setup)
    chosen, num_scores = tokens * experts.top_k, tokens * experts.num_experts
    scores = Saved("softmax of the chosen scores", SCORE_BYTES * chosen)
    if experts.sigmoid:
        # A score of 1 needs no division.
        divided = (
            (Saved("chosen scores", SCORE_BYTES * chosen), Saved("their sums", SCORE_BYTES * tokens))
            if experts.top_k > 1
            else ()
        )
        rows: tuple[Saved, ...] = (Saved("sigmoids of all scores", SCORE_BYTES * num_scores), *divided)
    else:
        rows = (scores,)
    rows = (*rows, Saved("numbers of the chosen experts", NUMBER_BYTES * chosen))
    weights = element_bytes(setup) * routed_tokens(setup)
    if setup.routing.dispatcher == "allgather":
        all_tokens = num_scores * setup.expert_tensor
        mask, gathered = (
            Saved("mask of this device's tokens", all_tokens),
            Saved("their scores", element_bytes(setup) * all_tokens),
        )
        return (*rows, mask, gathered, *((Saved("weights of tokens", weights),) * (setup.kernels == "gpu")))
    # Where experts are padded to a capacity a list of the taken replaces one of all pairs of a token and an expert.
    order = NUMBER_BYTES * (routed_tokens(setup) if setup.routing.padded else num_scores)
    return (*rows, Saved("order of tokens by experts", order), Saved("weights of tokens", weights))


def _shared_experts(setup: Setup, experts: Experts) -> tuple[Saved, ...]:
    """Shared experts are an MLP; with a gate its output is kept, too."""
    if not experts.shared_size:
        return ()
    inner = shard_size(element_bytes(setup) * num_tokens(setup) * experts.shared_size, setup.tensor)
    first = Saved("input of the shared experts' activation function", inner * (2 if setup.model.gated else 1))
    fused = setup.kernels == "gpu" or not setup.model.gated
    second = kept_bytes(setup, num_tokens(setup) * experts.shared_size, setup.tensor)
    inside = Saved("inside of the shared experts", second, 1 if fused else 3)
    gate = (
        Saved("output of the shared experts", sent_bytes(setup)),
        Saved("their gate", element_bytes(setup) * local_tokens(setup)),
    )
    return (first, inside, *(gate if experts.shared_gate else ()))


def experts_after_input(setup: Setup) -> tuple[Saved, ...]:
    """Return the inputs of experts' matrices, routed and shared, and the gradients of their outputs."""
    model, experts = setup.model, setup.model.experts
    assert experts is not None
    tokens, gates = element_bytes(setup) * routed_tokens(setup), 2 if model.gated else 1
    rows = (
        Saved("inputs of experts, gradients of their outputs", tokens * model.hidden_size, 2),
        Saved("inside of experts", shard_size((1 + gates) * tokens * experts.ffn_hidden_size, setup.expert_tensor)),
    )
    if not experts.shared_size:
        return rows
    dense = element_bytes(setup) * num_tokens(setup)
    inside = Saved("inside of the shared experts", shard_size((1 + gates) * dense * experts.shared_size, setup.tensor))
    return (*rows, inside, Saved("gradient behind the shared experts", dense * model.hidden_size))


def experts_working_bytes(setup: Setup) -> int:
    """Return the gradients of experts' inside, and of what enters and leaves them."""
    experts, gates = setup.model.experts, 2 if setup.model.gated else 1
    assert experts is not None
    routed = element_bytes(setup) * routed_tokens(setup)
    inside = shard_size((1 + gates) * routed * experts.ffn_hidden_size, setup.expert_tensor)
    return 2 * routed * setup.model.hidden_size + inside


def experts_touched_bytes(setup: Setup) -> float:
    """Return bytes read and written by experts' activation functions, and to order tokens by expert and back."""
    model, experts = setup.model, setup.model.experts
    assert experts is not None
    inside = (3 if model.gated else 2) * experts.ffn_hidden_size / setup.expert_tensor
    routed = element_bytes(setup) * routed_tokens(setup) * (inside + ORDERINGS * model.hidden_size)
    return routed + shared_inside_bytes(setup)


def experts_way_s(setup: Setup) -> float:
    """Return seconds for tokens to find their experts, to get there and back; gradients take as long."""
    return 2 * exchange(setup).seconds + ROUTING_KERNELS * KERNEL_S
