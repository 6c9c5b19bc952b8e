"""Turn text into the token files that Megatron trains on.

Reads a .jsonl file (or .jsonl.gz, or a quoted pattern for several) with one JSON object per line, and writes, for each
--json-keys KEY, the pair PREFIX_KEY_document.bin and .idx with the installed Megatron's own builder. Its flags are those
of the tool of this name in the Megatron-LM repository, which the wheel of megatron-core lacks; it has every tokenizer of
the wheel.

The output appears under its name only when it is complete, the index last: an interrupted run leaves nothing that could
be taken for a data set.
"""

import argparse
import contextlib
import dataclasses
import glob
import gzip
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

CHUNK = 32


class InputError(ValueError):
    """The arguments or the input cannot be used; the message says where and what to do."""


class Tokenizer(Protocol):
    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of the input and its place."""

    file: str
    number: int
    raw: bytes

    def fault(self, reason: str) -> InputError:
        return InputError(f"{self.file}, line {self.number}: {reason}")


# --- Reading and encoding


def input_files(pattern: str) -> list[str]:
    names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern))
    files = [name for name in names if Path(name).is_file()]
    if not files:
        raise InputError(f"--input {pattern}: no such file, and no file matches it as a pattern")
    return files


def read_lines(files: Iterable[str]) -> Iterator[Line]:
    for name in files:
        try:
            with gzip.open(name) if name.endswith(".gz") else open(name, "rb") as stream:
                for number, raw in enumerate(stream, start=1):
                    yield Line(name, number, raw)
        except (OSError, EOFError) as error:
            raise InputError(f"--input {name}: cannot be read: {error}") from error


def text_of(line: Line, key: str, record: Any) -> str:
    if not isinstance(record, dict):
        raise line.fault(f'is not a JSON object like {{"{key}": "..."}}')
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise line.fault(f"has no key {key!r}; it has {keys} (choose with --json-keys)")
    text = record[key]
    if not isinstance(text, str):
        raise line.fault(f"key {key!r} holds {type(text).__name__}, and a text is wanted")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes lines."""

    keys: list[str]
    tokenizer: Tokenizer
    append_eod: bool

    def __call__(self, line: Line) -> dict[str, list[int]] | str:
        """Return the tokens of a line by key. A fault is returned like tokens, so that the first in the input is reported."""
        try:
            return self._encode(line)
        except InputError as error:
            return str(error)

    def _encode(self, line: Line) -> dict[str, list[int]]:
        """Tokenize one line. An empty text has no tokens, a blank line none for any key."""
        if not line.raw.strip():
            return {key: [] for key in self.keys}
        try:
            record = json.loads(line.raw)
        except ValueError as error:  # not UTF-8, or not JSON
            raise line.fault(f"is not JSON: {error}") from error
        documents = {}
        for key in self.keys:
            try:
                ids = list(self.tokenizer.tokenize(text_of(line, key, record)))
            except InputError:
                raise
            except ValueError as error:  # half a surrogate pair, or words that a tokenizer does not know
                raise line.fault(f"the tokenizer refuses key {key!r}: {error}") from error
            documents[key] = [*ids, self.tokenizer.eod] if ids and self.append_eod else ids
        return documents


# The encoder of a forked process. It comes through the fork, because not every tokenizer can be pickled.
worker_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    global worker_encoder
    worker_encoder = encoder


def _encode_in_worker(line: Line) -> dict[str, list[int]] | str:
    return worker_encoder(line)


def encode_all(lines: Iterable[Line], encoder: Encoder, workers: int) -> Iterator[dict[str, list[int]]]:
    """Yield documents in the order of the input, whatever the number of workers."""
    with contextlib.ExitStack() as stack:
        results: Iterable[dict[str, list[int]] | str] = map(encoder, lines)
        if workers > 1:
            # Forked, because importing Megatron again takes longer than the work.
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(workers, _start_worker, (encoder,)))
            results = pool.imap(_encode_in_worker, lines, CHUNK)
        for result in results:
            if isinstance(result, str):
                raise InputError(result)
            yield result


# --- Writing


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The two files of one key, under their final and their unfinished names."""

    prefix: str
    key: str

    def final(self, suffix: str) -> Path:
        return Path(f"{self.prefix}_{self.key}_document.{suffix}")

    def unfinished(self, suffix: str) -> Path:
        path = self.final(suffix)
        return path.with_name(f"{path.name}.{os.getpid()}.unfinished")

    def publish(self) -> None:
        """Make the pair visible. Without its index a .bin is no data set, so the old index goes first, the new comes last."""
        self.final("idx").unlink(missing_ok=True)
        for suffix in ("bin", "idx"):
            self.unfinished(suffix).replace(self.final(suffix))

    def clear(self) -> None:
        for suffix in ("bin", "idx"):
            self.unfinished(suffix).unlink(missing_ok=True)


def check_outputs(outputs: list[Output], overwrite: bool) -> None:
    files = [output.final(suffix) for output in outputs for suffix in ("bin", "idx")]
    existing = " and ".join(str(file) for file in files if file.exists())
    if existing and not overwrite:
        raise InputError(f"{existing} exist already; remove them, give another --output-prefix, or say --overwrite")
    folder = outputs[0].final("bin").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-prefix: the folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output-prefix: the folder {folder} cannot be written to")


def write(outputs: list[Output], documents: Iterable[dict[str, list[int]]], vocab_size: int, interval: int) -> None:
    """Write all documents but empty ones, and print what was written. `interval`: documents between two progress lines."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    written = dict.fromkeys((output.key for output in outputs), 0)
    number, start_s = 0, time.monotonic()
    try:
        dtype = DType.optimal_dtype(vocab_size)
        builders = {output.key: IndexedDatasetBuilder(str(output.unfinished("bin")), dtype=dtype) for output in outputs}
        for number, parts in enumerate(documents, start=1):
            for key, ids in parts.items():
                if ids:
                    builders[key].add_document(ids, [len(ids)])
                    written[key] += 1
            if number % interval == 0:
                rate = number / max(time.monotonic() - start_s, 1e-9)
                print(f"Processed {number} documents ({rate:.1f} docs/s).", file=sys.stderr, flush=True)
        for output in outputs:
            if not written[output.key]:
                raise InputError(
                    f"key {output.key!r}: all {number} documents are empty, so there is nothing to train on"
                )
            builders[output.key].finalize(str(output.unfinished("idx")))
        for output in outputs:
            output.publish()
    except OSError as error:
        raise InputError(f"cannot write {outputs[0].prefix}_*: {error}") from error
    finally:
        for output in outputs:
            output.clear()
    for output in outputs:
        empty = f", {number - written[output.key]} empty ones left out" if number > written[output.key] else ""
        print(f"{output.final('bin')} and .idx: {written[output.key]} documents{empty}")


# --- The command


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. The tokenizer's flags are the installed Megatron's own, like the trainer's."""
    from megatron.scheduling.start.tokenizer import install_byte_level_tokenizer

    install_byte_level_tokenizer()
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = argparse.ArgumentParser(
        description="Tokenize a .jsonl file into Megatron's .bin/.idx.", allow_abbrev=False
    )
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    group = parser.add_argument_group("input data")
    group.add_argument("--input", required=True, help="a .jsonl or .jsonl.gz file, or a quoted pattern for several")
    keys = "keys to extract; each gives its own pair of files"
    group.add_argument("--json-keys", nargs="+", default=["text"], help=keys)
    group = parser.add_argument_group("tokenization process")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path of the output without _KEY_document.bin")
    overwrite = "replace output that exists (Megatron's tool always does)"
    group.add_argument("--overwrite", action="store_true", help=overwrite)
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="worker processes")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between two progress lines")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    if args.tokenizer_type is None:
        raise InputError("--tokenizer-type is missing; ByteLevelTokenizer needs no files")
    for name in ("workers", "log_interval"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise InputError(f"--json-keys {' '.join(args.json_keys)}: a key is named twice")


def build(args: argparse.Namespace) -> Tokenizer:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # Needed by Megatron's builder, without meaning here.
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 1, 128, 1
    try:
        tokenizer: Tokenizer = build_tokenizer(args)
    # A missing file, package or flag shows up as any kind of error, depending on the tokenizer.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"--tokenizer-type {args.tokenizer_type} cannot be built: {reason}") from error
    return tokenizer


def run(args: argparse.Namespace) -> None:
    check_arguments(args)
    files = input_files(args.input)
    outputs = [Output(args.output_prefix, key) for key in args.json_keys]
    check_outputs(outputs, args.overwrite)
    tokenizer = build(args)
    documents = encode_all(read_lines(files), Encoder(args.json_keys, tokenizer, args.append_eod), args.workers)
    write(outputs, documents, tokenizer.vocab_size, args.log_interval)


def main() -> int:
    # Megatron warns at import of every optional package that is not there; none is needed to tokenize.
    warnings.simplefilter("ignore")
    try:
        run(build_parser().parse_args())
    except InputError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
