"""Say what is recomputed in Megatron's flags, and read them.

In: a `Recompute`, or parsed flags. Out: flags, or the text of one.

Knows nothing of the other flags.
"""

from __future__ import annotations

from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import words
from bpipe.predict.recompute import MODULES, Recompute


def recompute_flags(recompute: Recompute) -> list[str]:
    """Return recomputation flags; none where nothing is recomputed."""
    if recompute.method is not None:
        layers = {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
        return words({"recompute_granularity": "full", **layers})
    return (
        words({"recompute_granularity": "selective", "recompute_modules": tuple(recompute.modules)})
        if recompute.modules
        else []
    )


def scope_of_flags(found: Options, notes: list[str]) -> tuple[str, dict[str, str]]:
    """Return what is recomputed, and what of it is not modelled.

    Raises ValueError where flags contradict each other.
    """
    granularity, modules = found.recompute_granularity, found.recompute_modules or ["core_attn"]
    if found.recompute_activations:
        if granularity == "full":
            raise ValueError(
                "--recompute-activations and --recompute-granularity full exclude each other: give one of them"
            )
        granularity = "selective"
    if granularity == "selective":
        return _parts(modules, found.num_experts is not None, notes)
    if granularity != "full":
        return granularity or "none", {}
    if found.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method")
    if found.recompute_num_layers is None:
        return "full", {} if found.recompute_method == "uniform" else {
            "recompute": "--recompute-method block without --recompute-num-layers"
        }
    return Recompute(method=found.recompute_method, num_layers=found.recompute_num_layers).text, {}


def _parts(modules: list[str], has_experts: bool, notes: list[str]) -> tuple[str, dict[str, str]]:
    """The same of parts of layers."""
    if not set(modules) <= set(MODULES):
        return "selective", {"recompute": f"--recompute-modules {' '.join(modules)}"}
    if "moe" in modules and not has_experts:
        # Megatron takes the name, and it does nothing.
        notes.append("--recompute-modules moe recomputes nothing in a model without experts")
        modules = [name for name in modules if name != "moe"]
    return Recompute(tuple(modules)).text, {}
