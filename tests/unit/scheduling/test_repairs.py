"""Repairs of a Megatron that is not there: which are made, which are left out, and what the log says of each."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megatron.scheduling.hooks import repairs
from megatron.scheduling.start import startup


def missing_attribute() -> bool:
    return bool(SimpleNamespace().grad_data)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = repairs.Repair(("megatron.core.made",), "what was broken works", lambda: True)
    sound = repairs.Repair(("megatron.core.sound",), "nothing was broken", lambda: False)
    untried = repairs.Repair(("megatron.core.changed", "megatron.core.other"), "state is saved", missing_attribute)
    last = repairs.Repair(("megatron.core.last",), "the last works", lambda: True)
    monkeypatch.setattr(repairs, "REPAIRS", (made, sound, untried, last))
    monkeypatch.delenv("RANK", raising=False)
    startup.repair.cache_clear()
    yield
    startup.repair.cache_clear()


def test_each_repair_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that prepares the process itself and is launched, too, wrapped the wrappers."""
    startup.repair()
    startup.repair()
    said = capsys.readouterr().out
    assert (
        said.count("bpipe: repaired in memory, without editing files: megatron.core.made: what was broken works\n") == 1
    )
    assert "megatron.core.sound" not in said


def test_without_repairs_none_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    startup.leave_unrepaired()
    assert capsys.readouterr().out == (
        "bpipe: --bpipe-no-repairs: Megatron is left unrepaired; without repairs it must itself ensure that what was broken works; "
        "nothing was broken; "
        "state is saved; the last works\n"
    )


def test_repairs_that_were_made_cannot_be_left_out_any_more() -> None:
    startup.repair()
    with pytest.raises(ValueError, match=r"^--bpipe-no-repairs: this process repaired Megatron before"):
        startup.leave_unrepaired()
