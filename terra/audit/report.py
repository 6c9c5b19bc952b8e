"""Say what an audit found.

In: an `Audit`. Out: text, a line of the program each, or plain values for JSON. Judges nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terra.audit.compare import Audit, Finding
from terra.trace.place import Place


def text(audit: Audit, steps: str = "steps") -> str:
    """Return the audit as text. `steps`: what was compared."""
    sizes = sorted(set(audit.num_operations))
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    lines = [f"{audit.num_steps} {steps} of {each} operations: {_count(audit)}"]
    by_line: dict[str, list[Finding]] = {}
    for found in audit.findings:
        by_line.setdefault(str(found.place), []).append(found)
    for line, findings in by_line.items():
        lines += ["", _short(line), *map(_line, findings)]
    if audit.findings:
        kinds = dict.fromkeys(found.kind for found in audit.findings)
        lines += ["", "consequences:", *(f"  {kind.title}: {kind.consequence}" for kind in kinds)]
    lines += ["", "not checked:", *(f"  {each}" for each in audit.unseen)]
    return "\n".join(lines) + "\n"


def _count(audit: Audit) -> str:
    if not audit.findings:
        return "nothing found that a CUDA graph would freeze, lose or break on"
    things = "1 thing" if len(audit.findings) == 1 else f"{len(audit.findings)} things"
    return f"{things} that a CUDA graph would freeze, lose or break on"


def _line(found: Finding) -> str:
    times = f", {found.times} times per step" if found.times > 1 else ""
    where = _where(found.place)
    return f"  {found.kind.title}: {found.operation}{times}: {found.detail}{f' ({where})' if where else ''}"


def _where(place: Place) -> str:
    return "; ".join(
        each for each in (f"backward, {place.backward_of}" if place.backward_of else "", place.within) if each
    )


def _short(place: str) -> str:
    """Below where the user stands, as a path from there."""
    path, _, line = place.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return place


def document(audit: Audit) -> dict[str, Any]:
    """Return the audit as JSON values, version 1."""
    return {
        "format": "terra-audit",
        "version": 1,
        "steps": audit.num_steps,
        "operations": list(audit.num_operations),
        "findings": [
            {
                "kind": found.kind.name.lower(),
                "file": found.place.file,
                "line": found.place.line,
                "function": found.place.function,
                "within": found.place.within,
                "backward_of": found.place.backward_of,
                "operation": found.operation,
                "times": found.times,
                "detail": found.detail,
                "consequence": found.kind.consequence,
            }
            for found in audit.findings
        ],
        "unseen": list(audit.unseen),
    }
