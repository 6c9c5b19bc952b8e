"""Find what differs between steps, and what a step does that a capture cannot hold.

In: recorded `Step`s. Out: an `Audit` of `Finding`s.

The step with the most operations is held against each other one, so that what comes only sometimes is compared too. Two
operations are the same node where they have the same name and place and come in one order between others that are. Of a
node every argument must be the same in all steps: the same plain value, the same memory from outside, or what the same
node made. What is made from what differs is not said again.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from math import prod

from terra.audit.record import LIFT, OWN_GENERATOR, Argument, Fixed, MadeInStep, Operation, Step
from terra.trace.place import Place

# What waits for the device to tell the host: a number, whether it went well, or how large a result is.
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "allclose"})
_INDEXING = ("index", "index_put_", "index_put")
_CHECKS = frozenset(
    {
        *(
            "_linalg_check_errors",
            "_linalg_eigh",
            "_linalg_svd",
            "linalg_eig",
            "linalg_lstsq",
            "linalg_pinv",
            "linalg_polar",
        ),
        *("linalg_matrix_sqrth", "cholesky", "cholesky_inverse", "cholesky_solve"),
    }
)
_SIZED_BY_DATA = frozenset(
    {
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "repeat_interleave",
        "bincount",
        "nonzero_numpy",
    }
)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_SEEDS = frozenset({"<manual_seed>", "<manual_seed_all>", "<seed>", "<set_rng_state>"})


# Of how many operations of a branch the names are said.
_MANY = 4
# Made by an operation that the fullest step has not.
_NOWHERE = -2


class Kind(enum.Enum):
    """Kind of a finding, and what follows from it when the step is captured once and replayed."""

    SCALAR = "scalar changes", "a replay repeats the captured number"
    ATTRIBUTE = "setting changes", "a replay repeats the captured one"
    REPLACED = (
        "tensor replaced",
        "a replay reads and writes the captured step's memory: copy into one tensor that stays",
    )
    SOURCE = "another value", "a replay takes it from where the captured step did"
    SHAPE = "shape varies", "a replay has the captured shape; torch.compile compiles again"
    SOMETIMES = "comes only sometimes", "a replay does what the captured step did"
    HOST_READ = "host reads", "a capture ends here with an error; torch.compile breaks its graph"
    SIZE = "size depends on data", "the host must wait to learn it: a capture ends here with an error"
    FROM_PYTHON = "values from Python", "a replay repeats the captured numbers"
    GENERATOR = (
        "generator of its own",
        "a capture ends with an error unless it is registered with the graph: CUDAGraph.register_generator_state",
    )
    SEED = "random state set", "a replay sets nothing: its random numbers go on"
    COLLECTIVE = (
        "collective",
        "every rank must capture and replay it in one order, and the group's time-out does not watch it",
    )

    def __init__(self, title: str, consequence: str) -> None:
        self.title, self.consequence = title, consequence


# What makes the host wait for the device.
_WAITS = (Kind.HOST_READ, Kind.SIZE)


@dataclass(frozen=True)
class Finding:
    """A finding: `detail` says what was seen; `times` how often in the step that has it most often."""

    kind: Kind
    place: Place
    operation: str
    detail: str
    times: int = 1


@dataclass(frozen=True)
class Audit:
    """Result of an audit: `findings` in the program's order; `unseen` says what may be there and could not be looked
    at."""

    num_steps: int
    num_operations: tuple[int, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...] = field(default=())


def compare(steps: Sequence[Step], unseen: Sequence[str] = ()) -> Audit:
    """Compare recorded steps. Raises ValueError for fewer than two: nothing could be said of what changes."""
    if len(steps) < 2:
        raise ValueError(
            f"{len(steps)} steps were recorded, but finding what changes from step to step needs 2 or more"
        )
    found = [*_across(steps), *_of_one_step(steps)]
    order = {id(operation): number for step in steps for number, operation in enumerate(step.operations)}
    found.sort(key=lambda each: order[id(each[1])])
    return Audit(len(steps), tuple(len(step.operations) for step in steps), tuple(_together(found)), tuple(unseen))


# A kind, the operation where it was found, and what was seen.
_Found = tuple[Kind, Operation, str]


def _together(found: Iterable[_Found]) -> Iterator[Finding]:
    """One finding of what is the same thing at one place, as of all parameters of a model; of a branch, all that is
    in it."""
    grouped: dict[tuple[Kind, object, object], list[tuple[Operation, str]]] = {}
    for kind, operation, detail in found:
        place = operation.place
        what = (str(place), detail) if kind is Kind.SOMETIMES else (place, operation.short)
        grouped.setdefault((kind, *what), []).append((operation, detail))
    for (kind, _, _), each in grouped.items():
        names = list(dict.fromkeys(operation.short for operation, _ in each))
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        yield Finding(kind, each[0][0].place, ", ".join(names[:_MANY]) + more, each[0][1], len(each))


# -- what every step shows by itself
# ---------------------------------------------------------------------------------------------------


def _of_one_step(steps: Sequence[Step]) -> Iterator[_Found]:
    """Said of the step that has most of it, so that what comes in each is counted once."""
    by_kind: dict[tuple[Kind, Place, str], list[list[_Found]]] = {}
    for place, step in enumerate(steps):
        # Beside a device the host may look at what is its own: Adam counts its steps there.
        host_is_free = any(
            each.meta and not _is_host(each) for operation in step.operations for each in operation.arguments
        )
        for operation in step.operations:
            kind, detail = _alone(operation, step)
            if host_is_free and kind in _WAITS and all(_is_host(each) for each in operation.arguments if each.meta):
                continue
            if kind is not None:
                key = kind, operation.place, operation.short
                by_kind.setdefault(key, [[] for _ in steps])[place].append((kind, operation, detail))
    for each in by_kind.values():
        yield from max(each, key=len)


def _alone(operation: Operation, step: Step) -> tuple[Kind | None, str]:
    name, short = operation.name, operation.short
    if name in _SEEDS:
        return Kind.SEED, f"{short.strip('<>')} is called in the step"
    if name.startswith("<"):
        return Kind.HOST_READ, f"{short.strip('<>')} of {_words(operation.arguments[0])}"
    if name.split(".")[0] in _COLLECTIVES:
        return Kind.COLLECTIVE, name
    if read := _read_by_host(operation):
        return Kind.HOST_READ, read
    if short in _SIZED_BY_DATA or (short in _INDEXING and _is_sized_by_mask(operation, step)):
        return Kind.SIZE, f"the result of {short}"
    if any(each.value == OWN_GENERATOR for each in operation.arguments):
        return Kind.GENERATOR, f"{short} draws from it"
    return None, ""


def _read_by_host(operation: Operation) -> str:
    """Return what the host reads by an operation, or nothing."""
    if operation.short in _HOST_READS:
        return f"a value of {_words(operation.arguments[0])}"
    if operation.short in _CHECKS:
        return "whether it succeeded"
    if operation.short == "_to_copy" and _leaves_device(operation):
        return f"a copy of {_words(operation.arguments[0])} to the host"
    return ""


def _is_host(argument: Argument) -> bool:
    return argument.meta.endswith(" cpu")


def _is_sized_by_mask(operation: Operation, step: Step) -> bool:
    """Return whether the places where a mask holds are listed.

    One number of the host's is filled in without a list: `tensor[mask] = 0.`.
    """
    indices = [each for each in operation.arguments if each.name.startswith("indices") and each.meta]
    masks = [each for each in indices if each.meta.startswith(("bool ", "uint8 "))]
    named = {each.name: each for each in operation.arguments}
    if not masks or "values" not in named:
        return bool(masks)
    is_filled = (
        len(indices) == 1 and not named["accumulate"].value and _is_host_number(named["values"], operation, step)
    )
    return not is_filled


def _is_host_number(argument: Argument, operation: Operation, step: Step) -> bool:
    """Return whether it is one on the host wherever the program runs: beside a device, or made of a number that was
    set."""
    if not _is_host(argument) or prod(argument.shape) != 1:
        return False
    if not all(_is_host(each) for each in operation.arguments if each.meta):
        return True
    made = argument.memory
    if not isinstance(made, MadeInStep) or made.operation < 0:
        return False
    maker = step.operations[made.operation]
    # Its gradient is a zero of the same place, whose forward has been judged.
    return maker.short == LIFT or (maker.short == "zeros" and maker.place.backward_of.startswith("IndexPut"))


def _leaves_device(operation: Operation) -> bool:
    to = next((str(each.value) for each in operation.arguments if each.name == "device"), "")
    return to == "cpu" and not _is_host(operation.arguments[0])


# -- what differs from step to step
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    """Which operations of a step are the same as which of the fullest one."""

    step: Step
    there: Mapping[int, int]
    back: Mapping[int, int]

    @classmethod
    def of(cls, fullest: Step, other: Step) -> _Match:
        keys = [[(operation.name, operation.place) for operation in each.operations] for each in (fullest, other)]
        if keys[0] == keys[1]:
            there = {number: number for number in range(len(keys[0]))}
        else:
            blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
            there = {start + number: begin + number for start, begin, length in blocks for number in range(length)}
        return cls(other, there, {other: one for one, other in there.items()})

    def as_fullest(self, memory: Fixed | MadeInStep | None) -> Fixed | MadeInStep | None:
        """What an operation made, by the operation of the fullest step that is the same."""
        if not isinstance(memory, MadeInStep) or memory.operation < 0:
            return memory
        return MadeInStep(self.back.get(memory.operation, _NOWHERE))


def _across(steps: Sequence[Step]) -> Iterator[_Found]:
    fullest = max(steps, key=lambda step: len(step.operations))
    matches = [_Match.of(fullest, step) for step in steps]
    yield from _sometimes(fullest, matches)
    nodes = _Nodes(fullest)
    for number, operation in enumerate(fullest.operations):
        same = [(match.step.operations[match.there[number]], match) for match in matches if number in match.there]
        yield from nodes.different(number, operation, same)


def _sometimes(fullest: Step, matches: Sequence[_Match]) -> Iterator[_Found]:
    """Return an operation that a step has and another has not, each place once."""
    for number, operation in enumerate(fullest.operations):
        having = sum(number in match.there for match in matches)
        if having < len(matches):
            yield Kind.SOMETIMES, operation, f"in {having} of {len(matches)} steps"
    # What the fullest has not: by its name, place and which of these it is.
    extra: dict[tuple[str, Place, int], list[Operation]] = {}
    for match in matches:
        counted = Counter[tuple[str, Place]]()
        for number, operation in enumerate(match.step.operations):
            if number not in match.back:
                key = operation.name, operation.place
                counted[key] += 1
                extra.setdefault((*key, counted[key]), []).append(operation)
    for same in extra.values():
        yield Kind.SOMETIMES, same[0], f"in {len(same)} of {len(matches)} steps"


class _Nodes:
    """What differs in the arguments of nodes, told in the order of the fullest step: each thing where it begins."""

    def __init__(self, fullest: Step) -> None:
        self._fullest = fullest
        # Memory of which it was said that it is another, and operations whose sizes vary.
        self._said: set[Fixed | MadeInStep] = set()
        self._varying: set[Fixed | MadeInStep] = set()

    def different(
        self, number: int, operation: Operation, same: Sequence[tuple[Operation, _Match]]
    ) -> Iterator[_Found]:
        if _alone(operation, self._fullest)[0] is Kind.HOST_READ:
            # What the host reads is wrong wherever it comes from.
            return
        named = [({argument.name: argument for argument in each.arguments}, match) for each, match in same]
        for argument in operation.arguments:
            seen = [(each[argument.name], match) for each, match in named if argument.name in each]
            found = _argument(argument, seen)
            if found is None or self._is_known(number, argument, found[0]):
                continue
            if found[0] is Kind.REPLACED and operation.short == LIFT:
                found = Kind.FROM_PYTHON, f"{_words(argument)} is made from numbers that Python holds"
            yield found[0], operation, found[1]

    def _is_known(self, number: int, argument: Argument, kind: Kind) -> bool:
        """Return whether it was said already where it began; note it otherwise."""
        if kind is Kind.ATTRIBUTE and not argument.meta:
            self._varying.add(MadeInStep(number))
        if kind is Kind.SHAPE or (kind is Kind.SCALAR and isinstance(argument.value, int)):
            known = argument.memory in self._varying or MadeInStep(number) in self._varying
            self._varying.add(MadeInStep(number))
            return known
        if kind in (Kind.REPLACED, Kind.SOURCE) and argument.memory is not None:
            known = argument.memory in self._said
            self._said.add(argument.memory)
            return known
        return False


def _argument(argument: Argument, of_steps: Sequence[tuple[Argument, _Match]]) -> tuple[Kind, str] | None:
    seen = [each for each, _ in of_steps]
    said = _setting(argument, seen)
    if said is not None or len(_different(match.as_fullest(each.memory) for each, match in of_steps)) == 1:
        return said
    if all(isinstance(each.memory, Fixed) for each in seen):
        return Kind.REPLACED, f"{argument.name}, {_words(argument)}, is another tensor"
    return Kind.SOURCE, f"{argument.name}, {_words(argument)}, comes from a different source"


def _setting(argument: Argument, seen: Sequence[Argument]) -> tuple[Kind, str] | None:
    """What differs of an argument but its memory."""
    shapes, metas, values = (_different(getattr(each, name) for each in seen) for name in ("shape", "meta", "value"))
    if len(shapes) > 1:
        return Kind.SHAPE, _in_turn(argument, (str(list(shape)) for shape in shapes))
    if len(metas) > 1:
        # A number has none.
        return Kind.ATTRIBUTE, _in_turn(argument, dict.fromkeys(each.meta or _number(each.value) for each in seen))
    if len(values) > 1:
        are_numbers = all(isinstance(value, int | float | complex) and not isinstance(value, bool) for value in values)
        return Kind.SCALAR if are_numbers else Kind.ATTRIBUTE, _in_turn(argument, map(_number, values))
    return None


def _in_turn(argument: Argument, words: Iterable[str]) -> str:
    return f"{argument.name} is {' then '.join(words)}"


def _different[T](values: Iterable[T]) -> list[T]:
    """Return each once, in order.

    Of equal numbers those of one type: 1 and 1.0 are two settings; no number is equal to itself there only.
    """
    found: dict[str, T] = {}
    for value in values:
        found.setdefault(f"{type(value).__name__} {value!r}", value)
    return list(found.values())


def _words(argument: Argument) -> str:
    kind, _, device = argument.meta.partition(" ")
    return f"{kind} {list(argument.shape)}{'' if device == 'cpu' else f' on {device}'}"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
