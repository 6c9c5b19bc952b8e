"""The trainer's reasons against configurations, and the features of a launch that are guarded or refused.

Both are by the trainer's table (`bpipe.config.features`) and flags. A launch without any flag of this project is judged as
with `--bpipe`.
"""

from collections.abc import Sequence
from dataclasses import replace

from bpipe.config.features.queries import (
    asked_by,
    by_state,
    features_of,
    reasons,
    reasons_of,
    settings_of,
    sliced_reasons,
)
from bpipe.config.features.table import PLACED, SHARDED, SLICED, Feature, Settings, State
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.space import is_in_order
from bpipe.predict.layout import Setup
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.program import Exchange

# Flags of a launch that no option covers, each with its first value or an empty string.
Others = Sequence[tuple[str, str]]
# With this flag the trainer's table also refuses what is guarded.
_STRICT = ("--bpipe-strict", "")


def runs_ours(setup: Setup) -> bool:
    """Whether anything other than Megatron's own loops would run."""
    return setup.balance is not None or _has_own_loop(setup)


def _has_own_loop(setup: Setup) -> bool:
    return setup.is_sharded or setup.slices > 1 or FAMILIES[setup.schedule].exchange is Exchange.POSTED


def refused(setup: Setup, others: Others = ()) -> tuple[str, ...]:
    """Return the trainer's reasons against this setup, one per line; none if only Megatron's own loops run."""
    if not runs_ours(setup):
        return ()
    flags = [word for pair in others for word in pair if word]
    settings = Settings(settings_of([*flags, *megatron_flags(setup)]))
    has_loop = _has_own_loop(setup)
    objections = reasons(settings, setup.balance is not None, has_loop, bool(settings.bpipe_strict))
    if has_loop and not is_in_order(setup.schedule, setup.pipeline, setup.num_chunks):
        objections += reasons_of(PLACED, settings, asked_by(settings))
    if setup.is_sharded:
        objections += reasons_of(SHARDED, settings, f"--bpipe-vocabulary {setup.vocabulary.value}")
    if setup.slices > 1:
        objections += sliced_reasons(settings, setup.slices, bool(settings.bpipe_strict))
    return tuple(objections)


def refused_launch(setup: Setup, reading: Reading | None) -> tuple[str, ...]:
    """Return the trainer's reasons against a launch as it is: those of the table, and those of the trainer itself."""
    reasons = refused(setup, () if reading is None else reading.others)
    return (*reasons, *(reason for reason in (reading.trainer if reading else ()) if reason not in reasons))


def guarded(setup: Setup, others: Others = ()) -> bool:
    """Whether the trainer accepts the setup but checks it during the run, because it never ran on a GPU."""
    return not refused(setup, others) and bool(refused(setup, (*others, _STRICT)))


def without_overlap(setup: Setup) -> Setup:
    """Return the setup without `--tp-comm-overlap`."""
    return replace(setup, switches=replace(setup.switches, tp_comm_overlap=False))


class Launchable:
    """Setups of one space as the trainer accepts them."""

    def __init__(self, others: Others) -> None:
        self._others = others
        # Whether a setup is refused as it is, and without the overlap, by all that the table reads and that differs in
        # one space.
        self._refused: dict[object, tuple[bool, bool]] = {}

    def of(self, setup: Setup) -> Setup | None:
        """Return the setup, without `--tp-comm-overlap` if only that is refused; None if it is refused anyway."""
        if not runs_ours(setup):
            return setup
        runs = (
            setup.balance,
            setup.schedule,
            setup.num_chunks,
            setup.pipeline,
            setup.vocabulary,
            setup.input_shards,
            setup.slices,
        )
        key = runs, setup.tensor > 1, setup.recompute, setup.routing.dispatcher, setup.fp8
        if key not in self._refused:
            others = self._others
            self._refused[key] = bool(refused(setup, others)), bool(refused(without_overlap(setup), others))
        as_it_is, without = self._refused[key]
        if not as_it_is:
            return setup
        return None if without else without_overlap(setup)


def states_of_launch(flags: Sequence[str]) -> list[Feature]:
    """Return the features of a launch that are guarded or refused, the worst first. Raises ValueError for a schedule file."""
    settings = Settings(settings_of(flags))
    ours = any(flag.startswith("--bpipe") for flag in flags)
    balance = bool(settings.bpipe) or not ours
    slices = _whole(settings.bpipe_slices)
    is_sharded = settings.bpipe_vocabulary is not None
    is_placed, needs_loop = _loop_of(settings)
    features = [
        *features_of(settings, balance, needs_loop or is_sharded or slices > 1 or bool(settings.bpipe_executor)),
        *(
            feature
            for table, wanted in ((PLACED, is_placed), (SHARDED, is_sharded), (SLICED, slices > 1))
            if wanted
            for feature in table
            if feature.applies(settings)
        ),
    ]
    if settings.bpipe_strict:
        features = [replace(row, state=State.REFUSED) if row.state is State.GUARDED else row for row in features]
    return by_state(dict.fromkeys(features))


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def worst(features: Sequence[Feature]) -> State:
    """Return the state of a launch: that of its worst feature."""
    return max((feature.state for feature in features), key=[*State].index, default=State.SUPPORTED)


def _loop_of(settings: Settings) -> tuple[bool, bool]:
    """Whether stages are placed differently from Megatron's, and whether the schedule needs our own loop."""
    ranks = _whole(settings.pipeline_model_parallel_size)
    chunks = _whole(settings.num_virtual_stages_per_pipeline_rank)
    if settings.num_layers_per_virtual_pipeline_stage:
        chunks = _whole(settings.num_layers) // (ranks * _whole(settings.num_layers_per_virtual_pipeline_stage)) or 1
    name = settings.bpipe_schedule or default_family(chunks)
    if name not in FAMILIES:
        raise ValueError(
            f"--bpipe-schedule {name}: what is refused depends on where its stages are, but a schedule file is not "
            "read here: name a family, or start the training run"
        )
    return not is_in_order(name, ranks, FAMILIES[name].min_chunks), FAMILIES[name].exchange is Exchange.POSTED
