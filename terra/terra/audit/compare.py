"""Find what differs between recorded steps, and what a step does that a capture cannot hold.

The step with the most operations is compared with each other one, so that what comes only sometimes is compared too.
Two operations are the same node if they have the same name and place, and the same order among the nodes. Every argument
of a node must be the same in all steps: the same plain value, the same memory from outside, or the result of the same
node. What is made from something that differs is not reported again.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import prod

from terra.audit.record import LIFT, OWN_GENERATOR, Argument, Fixed, MadeInStep, Operation, Step
from terra.trace.place import Place

# Operations that wait for the device to tell the host a number, whether it went well, or the size of a result.
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "allclose"})
_INDEXING = ("index", "index_put_", "index_put")
_CHECKS = frozenset(
    "_linalg_check_errors _linalg_eigh _linalg_svd linalg_eig linalg_lstsq linalg_pinv linalg_polar linalg_matrix_sqrth "
    "cholesky cholesky_inverse cholesky_solve".split()
)
_SIZED_BY_DATA = frozenset(
    "nonzero masked_select unique_dim _unique2 unique_consecutive repeat_interleave bincount nonzero_numpy".split()
)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_SEEDS = frozenset({"<manual_seed>", "<manual_seed_all>", "<seed>", "<set_rng_state>"})


# The operations of a branch that are named.
_MANY = 4
# The number of an operation that the fullest step does not have.
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
    """One thing that a capture would freeze, lose or break on."""

    kind: Kind
    place: Place
    operation: str
    # What was seen.
    detail: str
    # How often, in the step that has it most often.
    times: int = 1


@dataclass(frozen=True)
class Audit:
    """Result of an audit."""

    num_steps: int
    num_operations: tuple[int, ...]
    # In the program's order.
    findings: tuple[Finding, ...]
    # What the steps may do that an audit cannot look at.
    unseen: tuple[str, ...] = ()


def compare(steps: Sequence[Step], unseen: Sequence[str] = ()) -> Audit:
    """Compare recorded steps, of which there must be at least two."""
    if len(steps) < 2:
        raise ValueError(
            f"{len(steps)} steps were recorded, but finding what changes from step to step needs 2 or more"
        )
    order = {id(operation): number for step in steps for number, operation in enumerate(step.operations)}
    found = sorted((*_across(steps), *_of_one_step(steps)), key=lambda finding: order[id(finding[1])])
    return Audit(len(steps), tuple(len(step.operations) for step in steps), tuple(_together(found)), tuple(unseen))


# A kind, the operation where it was found, and what was seen.
_Found = tuple[Kind, Operation, str]


def _together(found: Iterable[_Found]) -> Iterator[Finding]:
    """Make one finding of the same thing at one place, such as of all parameters, and one of each branch."""
    grouped: dict[tuple[Kind, object, object], list[tuple[Operation, str]]] = {}
    for kind, operation, detail in found:
        place = operation.place
        thing = (str(place), detail) if kind is Kind.SOMETIMES else (place, operation.short)
        grouped.setdefault((kind, *thing), []).append((operation, detail))
    for (kind, _, _), group in grouped.items():
        names = list(dict.fromkeys(operation.short for operation, _ in group))
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        yield Finding(kind, group[0][0].place, ", ".join(names[:_MANY]) + more, group[0][1], len(group))


# -- what every step shows by itself


def _of_one_step(steps: Sequence[Step]) -> Iterator[_Found]:
    """Yield each thing of the step that has most of it, so that what comes in every step is counted once."""
    by_kind: dict[tuple[Kind, Place, str], list[list[_Found]]] = {}
    for place, step in enumerate(steps):
        # In a step that uses a device the host may look at its own tensors: Adam counts its steps there.
        host_is_free = not all(_is_on_host(operation) for operation in step.operations)
        for operation in step.operations:
            kind, detail = _alone(operation, step)
            if kind is not None and not (host_is_free and kind in _WAITS and _is_on_host(operation)):
                key = kind, operation.place, operation.short
                by_kind.setdefault(key, [[] for _ in steps])[place].append((kind, operation, detail))
    for of_steps in by_kind.values():
        yield from max(of_steps, key=len)


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
    if any(argument.value == OWN_GENERATOR for argument in operation.arguments):
        return Kind.GENERATOR, f"{short} draws from it"
    return None, ""


def _read_by_host(operation: Operation) -> str:
    """Return what the host reads by an operation, or an empty text."""
    if operation.short in _HOST_READS:
        return f"a value of {_words(operation.arguments[0])}"
    if operation.short in _CHECKS:
        return "whether it succeeded"
    if operation.short == "_to_copy" and not _is_host(operation.arguments[0]):
        to = next((argument.value for argument in operation.arguments if argument.name == "device"), "")
        return f"a copy of {_words(operation.arguments[0])} to the host" if str(to) == "cpu" else ""
    return ""


def _is_host(argument: Argument) -> bool:
    return argument.meta.endswith(" cpu")


def _is_on_host(operation: Operation) -> bool:
    """Whether all tensors among the arguments are on the host."""
    return all(_is_host(argument) for argument in operation.arguments if argument.meta)


def _is_sized_by_mask(operation: Operation, step: Step) -> bool:
    """Whether the places where a mask holds are listed: all but for one number of the host's, `tensor[mask] = 0.`."""
    indices = [argument for argument in operation.arguments if argument.name.startswith("indices") and argument.meta]
    named = {argument.name: argument for argument in operation.arguments}
    if not any(index.meta.startswith(("bool ", "uint8 ")) for index in indices):
        return False
    if "values" not in named or len(indices) > 1 or named["accumulate"].value:
        return True
    return not _is_host_number(named["values"], operation, step)


def _is_host_number(argument: Argument, operation: Operation, step: Step) -> bool:
    """Whether it is one number on the host, also where the program runs on a device."""
    if not _is_host(argument) or prod(argument.shape) != 1:
        return False
    if not _is_on_host(operation):
        return True
    made = argument.memory
    if not isinstance(made, MadeInStep) or made.operation < 0:
        return False
    maker = step.operations[made.operation]
    # The gradient of such a number is a zero at the same place.
    return maker.short == LIFT or (maker.short == "zeros" and maker.place.backward_of.startswith("IndexPut"))


# -- what differs from step to step


@dataclass(frozen=True)
class _Match:
    """The operations of a step that are the same nodes as those of the fullest one."""

    step: Step
    # From the numbers of the fullest step's operations to this one's, and the other way.
    to_step: Mapping[int, int]
    to_fullest: Mapping[int, int]

    @classmethod
    def of(cls, fullest: Step, other: Step) -> _Match:
        keys = [[(operation.name, operation.place) for operation in step.operations] for step in (fullest, other)]
        blocks = [(0, 0, len(keys[0]))]
        if keys[0] != keys[1]:
            blocks = list(SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks())
        pairs = [(start + number, begin + number) for start, begin, length in blocks for number in range(length)]
        return cls(other, dict(pairs), {number: of_fullest for of_fullest, number in pairs})

    def as_fullest(self, memory: Fixed | MadeInStep | None) -> Fixed | MadeInStep | None:
        """Return memory as the fullest step has it: made by the operation that is the same node."""
        if not isinstance(memory, MadeInStep) or memory.operation < 0:
            return memory
        return MadeInStep(self.to_fullest.get(memory.operation, _NOWHERE))


def _across(steps: Sequence[Step]) -> Iterator[_Found]:
    fullest = max(steps, key=lambda step: len(step.operations))
    matches = [_Match.of(fullest, step) for step in steps]
    yield from _sometimes(fullest, matches)
    nodes = _Nodes(fullest)
    for number, operation in enumerate(fullest.operations):
        same = [(match.step.operations[match.to_step[number]], match) for match in matches if number in match.to_step]
        yield from nodes.different(number, operation, same)


def _sometimes(fullest: Step, matches: Sequence[_Match]) -> Iterator[_Found]:
    """Yield each operation that not all steps have."""
    for number, operation in enumerate(fullest.operations):
        having = sum(number in match.to_step for match in matches)
        if having < len(matches):
            yield Kind.SOMETIMES, operation, f"in {having} of {len(matches)} steps"
    # What the fullest step lacks, by its name, place and number among these.
    extra: dict[tuple[str, Place, int], list[Operation]] = {}
    for match in matches:
        counted = Counter[tuple[str, Place]]()
        for number, operation in enumerate(match.step.operations):
            if number not in match.to_fullest:
                key = operation.name, operation.place
                counted[key] += 1
                extra.setdefault((*key, counted[key]), []).append(operation)
    for same in extra.values():
        yield Kind.SOMETIMES, same[0], f"in {len(same)} of {len(matches)} steps"


class _Nodes:
    """Finds what differs in the arguments of nodes, in the order of the fullest step: each thing where it begins."""

    def __init__(self, fullest: Step) -> None:
        self._fullest = fullest
        # Memory that was reported to be another, and operations whose sizes vary.
        self._reported: set[Fixed | MadeInStep] = set()
        self._varying: set[Fixed | MadeInStep] = set()

    def different(
        self, number: int, operation: Operation, same: Sequence[tuple[Operation, _Match]]
    ) -> Iterator[_Found]:
        if _alone(operation, self._fullest)[0] is Kind.HOST_READ:
            # What the host reads is wrong wherever it comes from.
            return
        named = [({argument.name: argument for argument in other.arguments}, match) for other, match in same]
        for argument in operation.arguments:
            of_steps = [(by_name[argument.name], match) for by_name, match in named if argument.name in by_name]
            kind, detail = _argument(argument, of_steps)
            if kind is None or self._is_reported(number, argument, kind):
                continue
            if kind is Kind.REPLACED and operation.short == LIFT:
                kind, detail = Kind.FROM_PYTHON, f"{_words(argument)} is made from numbers that Python holds"
            yield kind, operation, detail

    def _is_reported(self, number: int, argument: Argument, kind: Kind) -> bool:
        """Whether it was reported already where it began; otherwise note it."""
        if kind is Kind.ATTRIBUTE and not argument.meta:
            self._varying.add(MadeInStep(number))
        if kind is Kind.SHAPE or (kind is Kind.SCALAR and isinstance(argument.value, int)):
            reported = argument.memory in self._varying or MadeInStep(number) in self._varying
            self._varying.add(MadeInStep(number))
            return reported
        if kind in (Kind.REPLACED, Kind.SOURCE) and argument.memory is not None:
            reported = argument.memory in self._reported
            self._reported.add(argument.memory)
            return reported
        return False


def _argument(argument: Argument, of_steps: Sequence[tuple[Argument, _Match]]) -> tuple[Kind | None, str]:
    """Return what differs in an argument, if anything does."""
    seen = [other for other, _ in of_steps]
    kind, detail = _setting(argument, seen)
    if kind is not None or len(_different(match.as_fullest(other.memory) for other, match in of_steps)) == 1:
        return kind, detail
    if all(isinstance(other.memory, Fixed) for other in seen):
        return Kind.REPLACED, f"{argument.name}, {_words(argument)}, is another tensor"
    return Kind.SOURCE, f"{argument.name}, {_words(argument)}, comes from a different source"


def _setting(argument: Argument, seen: Sequence[Argument]) -> tuple[Kind | None, str]:
    """Return what differs in an argument, other than its memory."""
    shapes, metas, values = (_different(getattr(other, name) for other in seen) for name in ("shape", "meta", "value"))
    if len(shapes) > 1:
        return Kind.SHAPE, _in_turn(argument, (str(list(shape)) for shape in shapes))
    if len(metas) > 1:
        # A number has none.
        return Kind.ATTRIBUTE, _in_turn(argument, dict.fromkeys(other.meta or _number(other.value) for other in seen))
    if len(values) > 1:
        are_numbers = all(isinstance(value, int | float | complex) and not isinstance(value, bool) for value in values)
        return Kind.SCALAR if are_numbers else Kind.ATTRIBUTE, _in_turn(argument, map(_number, values))
    return None, ""


def _in_turn(argument: Argument, words: Iterable[str]) -> str:
    return f"{argument.name} is {' then '.join(words)}"


def _different[T](values: Iterable[T]) -> list[T]:
    """Return each value once, in order, told apart by type and text: 1 and 1.0 are two settings, NaN is one."""
    distinct: dict[str, T] = {}
    for value in values:
        distinct.setdefault(f"{type(value).__name__} {value!r}", value)
    return list(distinct.values())


def _words(argument: Argument) -> str:
    kind, _, device = argument.meta.partition(" ")
    return f"{kind} {list(argument.shape)}{'' if device == 'cpu' else f' on {device}'}"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
