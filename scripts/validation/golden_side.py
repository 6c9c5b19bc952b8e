"""Run the listed commands with one checkout's code.

In: the checkout (first on PYTHONPATH), cases as JSON. Out: a JSON line an output.

All run in this one process, through the command's `main`, the only thing that is asked of the checkout. An output's
bytes lie in outputs/, in a file named by their digest. Times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

OUT = Path("out")


def call(arguments: Sequence[str], source: bytes = b"") -> dict[str, bytes]:
    """What one call printed, how it ended, and the files that it left in out/."""
    from bpipe.cli import main as command

    OUT.mkdir(exist_ok=True)
    before = sys.stdin, sys.stdout, sys.stderr
    standard, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(source), "utf-8"), standard, errors
    try:
        status = str(command(list(arguments)))
    except SystemExit as ended:
        status = str(ended.code)
    except Exception as error:
        status = f"raised {type(error).__name__}: {error}"
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    found = {"status": status.encode()}
    for name, stream in (("stdout", standard), ("stderr", errors)):
        # A command may have closed what it could not write to.
        with contextlib.suppress(ValueError):
            stream.flush()
            found[name] = stream.buffer.getvalue()
    found |= {path.as_posix(): path.read_bytes() for path in sorted(OUT.rglob("*")) if path.is_file()}
    shutil.rmtree(OUT)
    return found


def _warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Without the file and the line, which may move."""
    print(f"{category.__name__}: {message}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    import bpipe

    if not Path(bpipe.__file__ or "").resolve().is_relative_to(options.checkout):
        sys.exit(f"bpipe is imported from {bpipe.__file__}, not from {options.checkout}")
    warnings.simplefilter("always")
    warnings.showwarning = _warn
    places = {str(options.checkout).encode(): b"CHECKOUT", str(Path.cwd()).encode(): b"WORK"}
    outputs = options.results.parent / "outputs"
    outputs.mkdir()
    with options.results.open("w") as results:
        for command, name, runs in json.loads(options.cases.read_text()):
            for label, arguments, source in runs:
                for output, content in call(arguments, b"" if source is None else Path(source).read_bytes()).items():
                    for place, word in places.items():
                        content = content.replace(place, word)
                    digest = hashlib.sha256(content).hexdigest()
                    path = outputs / digest
                    if not path.exists():
                        path.write_bytes(content)
                    results.write(json.dumps([command, name, f"{label} {output}", digest]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
