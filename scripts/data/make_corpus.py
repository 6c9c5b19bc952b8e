"""Collect a text corpus that every machine already has: the source of Python's own standard library.

In: the running interpreter's library folder. Out: a jsonl file, one line `{"text": ...}` a source file, always in the
same order, at most --max-bytes of text. Reads no network and imports nothing that it collects. The file is left
untouched where it would not change, so what was made from it stays newer than it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 6_000_000
# Tests repeat one another, encodings/ is tables of character codes, and what is installed beside the library is not the
# library.
SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "lib-dynload"}


def sources(library: Path) -> Iterator[Path]:
    """Return every .py file of the library but tests, ordered by its path's parts, so that neither locale nor file
    system matters."""
    kept = (path for path in library.rglob("*.py") if not SKIPPED.intersection(path.relative_to(library).parts))
    return iter(sorted(kept, key=lambda path: path.relative_to(library).parts))


def documents(library: Path, max_bytes: int) -> Iterator[str]:
    """Return the texts, whole files only, until the next one would pass `max_bytes`; files that are not UTF-8 or
    empty are left out."""
    total = 0
    for path in sources(library):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if not text.strip():
            continue
        total += len(text.encode())
        if total > max_bytes:
            return
        yield text


def corpus(library: Path, max_bytes: int) -> bytes:
    return "".join(
        json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents(library, max_bytes)
    ).encode()


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write whole or not at all; return whether anything was written."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the standard library's source as a jsonl corpus.")
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help=f"bytes of text at most (default {MAX_BYTES})")
    args = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    content = corpus(library, args.max_bytes)
    if not content:
        print(
            f"no source text in {library}: this Python was installed without its library's source (.py files)",
            file=sys.stderr,
        )
        return 1
    try:
        written = write_if_changed(args.output, content)
    except OSError as error:
        print(f"cannot write {args.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(
        f"{args.output}: {content.count(b'\n')} documents, {len(content)} bytes, "
        f"{'written' if written else 'unchanged'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
