"""Names that are read from Megatron, functions that are replaced, and their signatures."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.scheduling import launch
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options.flags import add_arguments
from megatron.scheduling.placement import rank_order as placement


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake Megatron with a version and a folder. Lines that were printed once can be printed again."""
    core = ModuleType("megatron.core")
    core.__file__ = "/checkout/megatron/core/__init__.py"
    vars(core)["__version__"] = "0.20.0rc0+1a2b3c4"
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setattr(sys.modules["megatron"], "core", core, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    upstream.remark.cache_clear()
    return SimpleNamespace(set_version=lambda version: vars(core).update(__version__=version))


def parsed(**more: Any) -> argparse.Namespace:
    """Megatron's arguments that are read before a process group exists, on rank 1 of 4 stages."""
    ours = vars(add_arguments(argparse.ArgumentParser()).parse_args(["--bpipe"]))
    unset = dict.fromkeys(
        """global_batch_size micro_batch_size padded_vocab_size seq_length sequence_parallel step_batch_size_schedule
        use_tp_pp_dp_mapping virtual_pipeline_model_parallel_size""".split()
    )
    sizes = dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size"), 1)
    place = {"rank": 1, "world_size": 4, "pipeline_model_parallel_size": 4}
    return argparse.Namespace(**{**ours, **unset, **sizes, **place, **more})


def test_the_development_branch_is_placed_without_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks tensor_parallel_num_weight_shards, which ended in a bare AttributeError."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = parsed()
    placement.apply(args)
    assert args.rank == 3, "the partner of stage 0 is its neighbour"


def test_absent_settings_of_an_untried_version_are_said_once(
    megatron: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A feature whose setting was renamed would never be refused again, and nobody would know."""

    class Renamed:
        def __getattr__(self, name: str) -> None:
            if name in ("fp8", "yaml_cfg", "bpipe_slices"):
                raise AttributeError(name)

    for _ in range(2):
        upstream.say_absent(Renamed(), configuration=False)
    assert capsys.readouterr().out == (
        "bpipe: megatron-core 0.20.0rc0 lacks these settings in its arguments; bpipe takes them for unset: fp8, yaml_cfg\n"
    )
    megatron.set_version("0.19.2+a1b2c3d")
    upstream.remark.cache_clear()
    upstream.say_absent(Renamed(), configuration=False)
    assert capsys.readouterr().out == "", "0.19.2 was read: what it lacks is known"


@pytest.mark.parametrize("name", ["rank", "world_size", "pipeline_model_parallel_size", "data_parallel_size"])
def test_an_argument_that_megatron_does_not_have_is_named(
    megatron: SimpleNamespace, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    args = parsed()
    delattr(args, name)
    with pytest.raises(SystemExit, match="2"):
        launch._validate(lambda args: None, args)
    assert capsys.readouterr().err == (
        f"bpipe: error: megatron-core 0.20.0rc0+1a2b3c4 at /checkout/megatron/core cannot be used by bpipe: its "
        f"arguments have no {name}. Install megatron-core==0.19.2, or train without bpipe\n"
    )
    with pytest.raises(AttributeError):
        launch._validate(lambda args: args.rank.missing, parsed())


def test_versions_are_compared_without_what_a_checkout_appends() -> None:
    place = Path("/somewhere/megatron/core")
    assert upstream.Running("0.19.2+1a2b3c4", place).tried
    assert upstream.Running("0.19.2", place).tried
    assert not upstream.Running("0.19.2rc0", place).tried
    assert not upstream.Running("core_main_1a2b3c4", place).tried, "what is no version was never tried"
    assert upstream.Running("core_main_1a2b3c4", place).release == "core_main_1a2b3c4"


def test_reading_the_table_of_refusals_loads_nothing_heavy() -> None:
    """A fresh interpreter, because other tests may have loaded torch into this one."""
    program = (
        "import sys, megatron.scheduling.options.arguments; sys.exit(' '.join({'torch', 'megatron.core'} & "
        "set(sys.modules)) or 0)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert process.returncode == 0, process.stderr


# Runs every `check_` function of the named modules, after the module's `setup`, if it has one.
RUN = """
import importlib, sys
from megatron.scheduling.start import startup
startup.prepare()
import torch.distributed as dist
from megatron.core import parallel_state
for name in sys.argv[1:]:
    module = importlib.import_module("tests.unit.scheduling." + name)
    getattr(module, "setup", lambda: None)()
    for name, check in list(vars(module).items()):
        if name.startswith("check_"):
            check()
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
"""
# Installs a stand-in for an extension before Megatron is imported.
FUSED = "from tests.gloo.fused import stand_in\nstand_in()\n"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "names"),
    [
        (RUN, ("check_patches", "check_beside", "check_shards", "check_placed", "check_sessions")),
        pytest.param(FUSED + RUN, ("check_halves",), marks=pytest.mark.slow),
        pytest.param(RUN, ("check_slices",), marks=pytest.mark.slow),
    ],
    ids=["small", "halves", "slices"],
)
def test_checks_in_a_process_of_their_own(program: str, names: tuple[str, ...]) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", program, *names]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
