"""Say in one answer what to run: the launch as it stands, the best of stock Megatron, or the best with this project.

In: what stands to choose from, each with its prediction. Out: an `Answer`, in a few lines or as JSON values. Predicts
nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bpipe.plan.explain import CLEARLY, describe, is_level
from bpipe.plan.predict import SetupPrediction
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import error_bars, is_never_calibrated, range_text


class ChoiceKind(StrEnum):
    """Kind of a choice, in the order in which they are taken where they are level: what is there already before stock,
    stock before ours."""

    LAUNCH = "launch"
    STOCK = "stock"
    OURS = "bpipe"


@dataclass(frozen=True, slots=True)
class Choice:
    """Something to run. `flags`: what launches it, in words; of the launch itself there is nothing to say. `refused`:
    the trainer's reasons against it."""

    kind: ChoiceKind
    prediction: SetupPrediction
    flags: str = ""
    refused: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        return float(self.prediction.timing.iteration_s)

    @property
    def can_run(self) -> bool:
        return self.prediction.fits and not self.refused

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Range of seconds that it is likely to take; None where no run of its kind is known."""
        bars = error_bars(self.prediction.setup)
        return None if bars is None else bars.range_s(self.iteration_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """Choices in the order of their kinds, and which to take: the first that no other is clearly faster than. None:
    nothing can run."""

    choices: tuple[Choice, ...]
    taken: Choice | None


def answer(choices: Sequence[Choice]) -> Answer:
    """Return the answer that these choices give."""
    ordered = tuple(sorted(choices, key=lambda one: list(ChoiceKind).index(one.kind)))
    able = [one for one in ordered if one.can_run]
    least = min((one.iteration_s for one in able), default=0.0)
    return Answer(ordered, next((one for one in able if is_level(one.iteration_s, least)), None))


def answer_lines(found: Answer) -> list[str]:
    """Return the answer for a person: a line for each choice and what to change for it, which to take, and how far
    predictions may be off."""
    lines = []
    for one in found.choices:
        lines.append(_line(one, found.choices[0]))
        lines += [f"        {one.flags}"] if one.flags else []
        lines += [f"        the trainer refuses this: {reason}" for reason in one.refused[:2]]
    lines.append(_advice(found))
    if found.choices:
        lines.append(_doubt(found.choices[-1]))
    return lines


def _line(one: Choice, first: Choice) -> str:
    seconds = range_text(one.prediction.setup, one.iteration_s)
    limit = one.prediction.memory[0].limit_bytes
    beside = "" if one is first else f"  {first.iteration_s / one.iteration_s:.2f}x"
    tight = ", tight" if one.prediction.is_tight else ""
    fits = tight if one.prediction.fits else ", does not fit"
    return (
        f"{one.kind.capitalize():6}  {one.iteration_s:.3f} s{seconds}{beside}  {gib_text(one.prediction.peak_bytes)} "
        "of "
        f"{gib_text(limit)} GiB{fits}  {describe(one.prediction.setup)}"
    )


def _advice(found: Answer) -> str:
    taken = found.taken
    if taken is None:
        return "None of these can run."
    others = [one for one in found.choices if one is not taken and one.can_run]
    beside = ", ".join(f"{_apart(taken, one)} than {_WHOSE[one.kind]}" for one in others)
    reason = f": its iteration takes {beside}" if beside else ""
    level = [one for one in others if one.iteration_s < taken.iteration_s]
    doubt = f"; predictions cannot tell apart what differs by less than {100 * (CLEARLY - 1):.0f} %" if level else ""
    tight = "; it is tight, and what that costs is not predicted" if taken.prediction.is_tight else ""
    return f"{_TAKE[taken.kind]}{reason}{doubt}{tight}."


_TAKE = {ChoiceKind.LAUNCH: "Keep the launch", ChoiceKind.STOCK: "Take stock", ChoiceKind.OURS: "Take bpipe"}
_WHOSE = {ChoiceKind.LAUNCH: "the launch's", ChoiceKind.STOCK: "stock's", ChoiceKind.OURS: "bpipe's"}


def _apart(one: Choice, other: Choice) -> str:
    percent = 100 * (one.iteration_s / other.iteration_s - 1)
    return f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'} time"


def _doubt(one: Choice) -> str:
    cluster, bars = one.prediction.setup.cluster, error_bars(one.prediction.setup)
    if bars is None:
        return f"Never calibrated: no measured run on {cluster.device.name} is known, so times may be far off."
    differed = f"differed from their prediction by {bars.low:+d} to {bars.high:+d} % (plus is slower)"
    never = " Never calibrated: the constants come from A100s and H100s." if is_never_calibrated(cluster) else ""
    return f"Ranges in brackets: {bars.num_runs} measured runs of {bars.kind} {differed}: docs/validation.md.{never}"


def answer_document(found: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    return {
        "take": None if found.taken is None else found.taken.kind.value,
        "choices": {
            one.kind.value: {
                "iteration_s": one.iteration_s,
                "range_s": None if one.range_s is None else list(one.range_s),
                "peak_bytes": one.prediction.peak_bytes,
                "can_run": one.can_run,
                "flags": one.flags,
            }
            for one in found.choices
        },
    }
