"""Collect a text corpus that every machine already has: the source of Python's own standard library.

Writes a jsonl file, one line `{"text": ...}` per source file, always in the same order, at most --max-bytes of text.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 6_000_000
# Tests repeat one another, encodings/ is tables of character codes, and installed packages are not the library.
SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "lib-dynload"}


def documents(library: Path, max_bytes: int) -> Iterator[str]:
    """Yield the texts of whole files, until the next one would pass `max_bytes`, without those that are not UTF-8.

    They are ordered by the parts of their paths, so that neither locale nor file system matters.
    """
    total = 0
    paths = {path.relative_to(library).parts: path for path in library.rglob("*.py")}
    for path in (paths[parts] for parts in sorted(paths) if not SKIPPED.intersection(parts)):
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
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents(library, max_bytes))
    return "".join(lines).encode()


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
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_bytes(content)
    except OSError as error:
        print(f"cannot write {args.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{args.output}: {content.count(b'\n')} documents, {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
