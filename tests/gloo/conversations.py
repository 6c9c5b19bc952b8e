"""Conversations for `--sft`, and stand-ins for two packages that Megatron reads them with and tests do not install.

`write` makes a file of conversations. The stand-ins are `load_dataset` of Hugging Face's datasets, which reads lines of
JSON, and a tokenizer of its transformers, which takes words for tokens and renders Megatron's own template. The
dataset, packing, prompt masks and the class around the tokenizer are Megatron's.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

PAD, END, WORDS, SIZE = 1, 2, 3, 127
# Words of the answers in each line's conversations; the first line does not save the most for attention.
ANSWERS = ((2, 2, 2, 2, 2), (9, 9), (40,), (3, 20), (60,), (1, 2, 3, 4))


def write(path: Path) -> Path:
    """Write the file, and return its path."""
    lines = []
    for number in range(64):
        messages = []
        for words in ANSWERS[number % len(ANSWERS)]:
            messages += [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": f"count {number}"},
                {"role": "assistant", "content": " ".join(f"w{number}x{word}" for word in range(words))},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


class Words:
    """A tokenizer of transformers, with the methods that Megatron's `SFTTokenizer` calls."""

    eos_token_id = END

    def __len__(self) -> int:
        return SIZE

    def convert_tokens_to_ids(self, _: str) -> int:
        return PAD

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, chat_template: str, **_: Any
    ) -> dict[str, list[int]]:
        text = _template(chat_template).render(messages=conversation)
        return {"input_ids": [WORDS + zlib.crc32(word.encode()) % (SIZE - WORDS) for word in re.findall(r"\S+", text)]}


# Megatron passes the same template with each message, and compiling it takes longer than a step of these trainings.
@lru_cache
def _template(text: str) -> Any:
    from jinja2 import Template

    return Template(text)


def _loaded(_: str, data_files: str, **__: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Make Megatron find both packages."""
    from megatron.core.tokenizers.text.libraries import sft_tokenizer

    datasets = ModuleType("datasets")
    datasets.load_dataset = _loaded  # type: ignore[attr-defined]
    transformers = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda **_: Words()))
    with (
        mock.patch.dict(sys.modules, {"datasets": datasets}),
        mock.patch.object(sft_tokenizer, "transformers", transformers, create=True),
        mock.patch.object(sft_tokenizer, "HAVE_TRANSFORMERS", True),
    ):
        yield
