"""What stands before and after the layers: embedding, output layer and loss, whole or in shards."""

from bpipe.predict.layers.norms import dropout_saved, local_norms_saved, norms_before_copies
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import matrix_products
from bpipe.predict.sizes import Rates, Saved, element_bytes, num_tokens, predicted_tokens, sent_bytes, shard_size, total
from bpipe.predict.states import parameter_bytes
from bpipe.schedule.layout import Vocabulary
from bpipe.simulate.cost import ShardCost

# Bytes for every logit: the loss in 32 bit and its gradient.
LOSS_FORWARD, LOSS_BACKWARD = 38, 14
# The same of a shard, which torch's own kernels go through in 32 bit and in place: statistics in S, the gradient in T,
# and what of the input's gradient algorithm 2 computes in S.
SHARD_STATISTICS, SHARD_GRADIENT, SHARD_EARLY = 32, 42, 36
# The loss keeps the softmax in 32 bit for its backward, whatever the precision.
LOSS_BYTES = 4
# Token numbers and targets are 64 bit; where the vocabulary is divided, a mask of one byte says which of them are this
# rank's.
TOKEN_BYTES = 8
MASK_BYTES = 1
# Of a shard's logits every token's maximum, sum of exponentials and label's logit are gathered from all shards, in 32
# bit; what a shard gives the output layer's input before the totals are known is 32 bit, too.
STATISTICS, STATISTICS_BYTES, EARLY_BYTES = 3, 4, 4
# Megatron divides the loss by the number of tokens, a 32-bit tensor, and of micro-batches, which torch makes one of 64
# bit.
TOKEN_COUNT_BYTES, MICROBATCH_COUNT_BYTES = 4, 8
# Beside what the loss saves, logits in 16 bit and their gradient in 32 bit come and go.
LOSS_WORKING_BYTES = 6
# Logits of a shard that are in 32 bit at a time (bpipe.runtime.shards).
WIDE_AT_ONCE = 2**23


def output_seconds(setup: Setup) -> tuple[float, float]:
    """Return the output layer and the loss, once for each token that is predicted."""
    rows, memory = setup.padded_vocabulary / setup.tensor, Rates.of(setup).memory
    logits = num_tokens(setup) * rows
    product = matrix_products(setup, setup.model.hidden_size, rows)
    forward = product.forward_s + LOSS_FORWARD * logits / memory
    backward = product.input_s + product.weight_s + LOSS_BACKWARD * logits / memory
    return setup.model.num_predictions * forward, setup.model.num_predictions * backward


def shard_seconds(setup: Setup) -> ShardCost:
    """Return a rank's shard of the output layer, and of the embedding where that is split, too."""
    rows, memory = setup.padded_vocabulary / setup.vocabulary_shards, Rates.of(setup).memory
    logits = predicted_tokens(setup) * rows
    product = matrix_products(setup, setup.model.hidden_size, rows, predicted_tokens(setup))
    # Of three products algorithm 1 has two in T, algorithm 2 two in S.
    early = setup.vocabulary is Vocabulary.TWO
    forward = product.forward_s + product.input_s * early + (SHARD_STATISTICS + SHARD_EARLY * early) * logits / memory
    backward = product.weight_s + product.input_s * (not early) + SHARD_GRADIENT * logits / memory
    lookup, added = embedding_seconds(setup) if setup.input_shards else (0.0, 0.0)
    return ShardCost(forward, backward, lookup, added, shard_bytes(setup))


def embedding_seconds(setup: Setup) -> tuple[float, float]:
    """Return seconds to look up a micro-batch's tokens, and to add up their gradients.

    The latter makes a gradient of the whole table and adds it to the present one: for 256000 rows of 3072 that was 4.1
    ms on an A100, as long as the backward of a layer (Yeung et al. 2024, by which the first rank was slower than the
    second).
    """
    rates, element = Rates.of(setup), element_bytes(setup)
    tokens = 3 * element * num_tokens(setup) * setup.model.hidden_size / rates.memory
    rows = setup.padded_vocabulary / (setup.vocabulary_shards if setup.input_shards else setup.tensor)
    return tokens, tokens + 2 * (element + parameter_bytes(setup)[1]) * rows * setup.model.hidden_size / rates.memory


def shard_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what a shard of the output layer holds of a micro-batch from S to T."""
    if not setup.is_sharded:
        return ()
    tokens = predicted_tokens(setup)
    rows = (
        Saved(
            "logits of the shard",
            shard_size(element_bytes(setup) * tokens * setup.padded_vocabulary, setup.vocabulary_shards),
        ),
        Saved("input of the output layer", setup.model.num_predictions * sent_bytes(setup)),
        Saved("labels", TOKEN_BYTES * tokens),
        Saved("gradients of the tokens' losses", LOSS_BYTES * tokens),
    )
    if setup.vocabulary is not Vocabulary.TWO:
        return rows
    early = Saved("part of the input's gradient", EARLY_BYTES * tokens * setup.model.hidden_size)
    return (*rows, Saved("statistics of the shard", STATISTICS * STATISTICS_BYTES * tokens), early)


def shard_bytes(setup: Setup) -> int:
    """Return bytes that each rank's shard holds from S to T."""
    return total(shard_saved(setup))


def embedding_saved(setup: Setup, *, shifted: bool = False) -> tuple[Saved, ...]:
    """Return what the embedding saves, of a micro-batch's tokens or of those shifted to a further one."""
    tokens = num_tokens(setup)
    if setup.kernels == "gpu":
        return (Saved("tokens", TOKEN_BYTES * tokens), *dropout_saved(setup, 1))
    # The tokens are the data iterator's own, unless a divided vocabulary needs them masked, they are shifted, or a slice
    # is cut from them.
    divided = (Saved("tokens of this part", TOKEN_BYTES * tokens), Saved("mask of this part", MASK_BYTES * tokens))
    cut = (Saved("tokens of this slice", TOKEN_BYTES * tokens),) if shifted or setup.span is not None else ()
    positions = cut if setup.model.learned_positions else ()
    return (*dropout_saved(setup, 1), *(divided if setup.tensor > 1 else cut), *positions)


def last_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what the last stage saves after its layers; the loss belongs to shards, if there are some."""
    return _output(setup) if setup.is_sharded else (*_output(setup), *_loss(setup))


def _output(setup: Setup) -> tuple[Saved, ...]:
    if setup.model.further is not None:
        # Megatron joins what is predicted from; the final norm is on another stage, perhaps.
        return (Saved("inputs of the output layer", setup.model.num_predictions * sent_bytes(setup)),)
    if setup.kernels == "cpu":
        return local_norms_saved(setup, 1)
    return (Saved("inputs of the final norm and of the output layer", sent_bytes(setup), 2),)


def final_norm_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what the final norm saves where it is apart from the output layer, as with further tokens."""
    return () if setup.model.further is None else norms_before_copies(setup, 1)


def _loss(setup: Setup) -> tuple[Saved, ...]:
    """Each token that is predicted has a loss of its own."""
    tokens, losses = num_tokens(setup), setup.model.num_predictions
    num_bytes = shard_size(LOSS_BYTES * tokens * setup.padded_vocabulary, setup.tensor)
    softmax = Saved("softmax of the logits", num_bytes, losses)
    if setup.kernels == "gpu":
        return (softmax,)
    targets = (Saved("targets", TOKEN_BYTES * tokens, losses), Saved("mask of targets", MASK_BYTES * tokens, losses))
    further = (
        Saved("losses of further tokens, and their mask", LOSS_BYTES * tokens, 2 * (losses - 1)),
        Saved("numbers of further tokens", TOKEN_COUNT_BYTES, losses - 1),
        Saved("share of a further token's loss", MICROBATCH_COUNT_BYTES, losses - 1),
    )
    return (
        softmax,
        *targets,
        *further,
        Saved("number of tokens", TOKEN_COUNT_BYTES),
        Saved("number of micro-batches", MICROBATCH_COUNT_BYTES),
    )


def loss_working_bytes(setup: Setup) -> int:
    """Return temporaries of the loss besides what it saves."""
    return shard_size(LOSS_WORKING_BYTES * num_tokens(setup) * setup.padded_vocabulary, setup.tensor)


def shard_working_bytes(setup: Setup) -> int:
    """Return temporaries of S and T besides the logits, whose gradient takes their place: a part of them in 32
    bit, twice, the part of the input's gradient, as it is computed and in 32 bit, and the statistics of all shards."""
    logits = shard_size(predicted_tokens(setup) * setup.padded_vocabulary, setup.vocabulary_shards)
    part = predicted_tokens(setup) * setup.model.hidden_size
    statistics = STATISTICS * STATISTICS_BYTES * predicted_tokens(setup) * setup.vocabulary_shards
    return 2 * 4 * min(logits, WIDE_AT_ONCE) + (element_bytes(setup) + 4) * part + statistics
