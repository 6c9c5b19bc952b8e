"""Offer megatron-core's byte-level tokenizer as `--tokenizer-type ByteLevelTokenizer`.

The core library has the class, but its command line does not offer it, and its builder passes keywords that the class
refuses.
"""

import dataclasses
import functools
import typing
from typing import Any

NAME = "ByteLevelTokenizer"
NUM_BYTES = 256
DEFAULT_VOCABULARY = 512


def install_byte_level_tokenizer() -> str | None:
    """Add the choice to Megatron's parser and builder; return why that is impossible, or None."""
    # This name is both a function and the module that holds it; import the module itself.
    import importlib

    try:
        from megatron.training import global_vars
        from megatron.training.config.training_config import TokenizerConfig

        builder = importlib.import_module("megatron.core.tokenizers.utils.build_tokenizer")
        supported = builder.SUPPORTED_TOKENIZERS
    except (ImportError, AttributeError) as error:
        return f"{NAME} is not available, because this Megatron has its tokenizers elsewhere ({error})"
    if NAME in supported:
        return None
    field = next(field for field in dataclasses.fields(TokenizerConfig) if field.name == "tokenizer_type")
    field.type = typing.Literal[(*typing.get_args(field.type), NAME)]
    supported.append(NAME)
    plain = builder.build_tokenizer

    @functools.wraps(plain)
    def build_tokenizer(args: Any, **kwargs: Any) -> Any:
        if args.tokenizer_type != NAME:
            return plain(args, **kwargs)
        tokenizer = _byte_level(args.vocab_size or DEFAULT_VOCABULARY)
        if args.pad_vocab_size:
            builder._set_padded_vocab_size(args, tokenizer)
        return tokenizer

    builder.build_tokenizer = build_tokenizer  # type: ignore[attr-defined]
    global_vars.build_tokenizer = build_tokenizer
    return None


def _byte_level(vocab_size: int) -> Any:
    """Return a tokenizer whose ids 0..255 are bytes; end of document, padding and begin of sequence follow."""
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.libraries.bytelevel_tokenizer import ByteLevelTokenizer

    if vocab_size < NUM_BYTES + 3:
        raise ValueError(
            f"--vocab-size {vocab_size}: {NAME} needs {NUM_BYTES} bytes and 3 special tokens; give at least "
            f"{NUM_BYTES + 3}"
        )

    class BytesAboveSpecials(ByteLevelTokenizer):  # type: ignore[misc]
        """The core's class decodes every id below its vocabulary as a byte; only the first 256 are."""

        def ids_to_text(self, ids: list[int]) -> str:
            return bytes(i for i in ids if i < NUM_BYTES).decode("utf-8", errors="ignore")

    special = {"_eos_id": NUM_BYTES, "_pad_id": NUM_BYTES + 1, "_bos_id": NUM_BYTES + 2}
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=vocab_size, **special
    )
    tokenizer._tokenizer = BytesAboveSpecials(vocab_size=vocab_size, **special)
    return tokenizer
