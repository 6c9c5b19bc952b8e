"""`bpipe check-launch`: whether a launch of Megatron trains with this project, and which features prevent it.

The exit status is 2 if it is refused.
"""

from bpipe.commands.launch import flags_of, judgement_of, words_of
from bpipe.commands.terminal import print_json, table, tell
from bpipe.config.features.table import Feature, State
from bpipe.config.flags import configurations, outputs
from bpipe.config.flags.flag import Options, Task, command, group

COMMAND = command(
    configurations.LAUNCHED,
    group("", outputs.FORMAT),
    Task(
        "check flags before a launch",
        "bpipe check-launch -- --fp8-format hybrid --tp-comm-overlap --pipeline-model-parallel-size 8",
        "launch megatron format",
    ),
)


def run(options: Options) -> int:
    from bpipe.plan.refusals import states_of_launch, worst

    words = words_of(options)
    if words is None:
        raise ValueError("name the launch: --launch FILE, or its flags after --")
    judgement = judgement_of(words)
    flags = flags_of(words, judgement.unknown)
    features = states_of_launch(flags)
    # What Megatron and the trainer refuse beyond the table of features.
    refusals = [("Megatron", judgement.refused)] if judgement.refused is not None else []
    refusals += [
        ("the trainer", line)
        for line in judgement.trainer
        if not any(f": {feature.reason}; " in line for feature in features)
    ]
    features = [*(Feature(name, lambda _: True, reason, "") for name, reason in refusals), *features]
    state = worst(features)
    if options.format == "json":
        judged = {"judged_by": judgement.by, "unknown_flags": list(judgement.unknown or ())}
        print_json({"state": state.value, **judged, "features": [_values(feature) for feature in features]})
    else:
        if features:
            rows = [(feature.state.value, feature.name, feature.reason, feature.remedy) for feature in features]
            tell(table(("state", "feature", "reason", "way out"), rows))
        tell(judgement.by)
        tell(f"this launch is {state.value}{_MEANS[state]}")
    return 2 if state is State.REFUSED else 0


_MEANS = {
    State.SUPPORTED: ": none of its flags is guarded or refused (docs/supported.md)",
    State.GUARDED: ": in the first iterations all that moves is checked, and the run ends at the first wrong byte",
    State.REFUSED: ": it would end at its start",
}


def _values(feature: Feature) -> dict[str, str]:
    return {
        "name": feature.name,
        "state": feature.state.value,
        "reason": feature.reason,
        "way_out": feature.remedy,
        "proof": feature.proof,
    }
