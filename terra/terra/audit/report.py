"""Write an audit as text, or as plain values for JSON."""

from pathlib import Path
from typing import Any

from terra.audit.compare import Audit, Finding


def text(audit: Audit) -> str:
    """Return the audit as text."""
    sizes = sorted(set(audit.num_operations))
    size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    count = len(audit.findings)
    things = f"{count} thing{'s' * (count > 1)}" if count else "nothing found"
    lines = [f"{audit.num_steps} steps of {size} operations: {things} that a CUDA graph would freeze, lose or break on"]
    by_line: dict[str, list[Finding]] = {}
    for finding in audit.findings:
        by_line.setdefault(str(finding.place), []).append(finding)
    for line, findings in by_line.items():
        lines += ["", _short(line), *map(_line, findings)]
    if audit.findings:
        kinds = dict.fromkeys(finding.kind for finding in audit.findings)
        lines += ["", "consequences:", *(f"  {kind.title}: {kind.consequence}" for kind in kinds)]
    lines += ["", "not checked:", *(f"  {limit}" for limit in audit.unseen)]
    return "\n".join(lines) + "\n"


def _line(finding: Finding) -> str:
    times = f", {finding.times} times per step" if finding.times > 1 else ""
    backward = f"backward, {finding.place.backward_of}" if finding.place.backward_of else ""
    where = "; ".join(filter(None, (backward, finding.place.within)))
    return f"  {finding.kind.title}: {finding.operation}{times}: {finding.detail}{f' ({where})' if where else ''}"


def _short(place: str) -> str:
    """Return a place below the current folder as a path from there."""
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
                "kind": finding.kind.name.lower(),
                "file": finding.place.file,
                "line": finding.place.line,
                "function": finding.place.function,
                "within": finding.place.within,
                "backward_of": finding.place.backward_of,
                "operation": finding.operation,
                "times": finding.times,
                "detail": finding.detail,
                "consequence": finding.kind.consequence,
            }
            for finding in audit.findings
        ],
        "unseen": list(audit.unseen),
    }
