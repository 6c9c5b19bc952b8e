"""Rows for every slice of a micro-batch, and one report of theirs; without Megatron."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bpipe.runtime.errors import RuntimeFault
from megatron.scheduling.slices.cuts import Cutting, RepeatedRows, Reports

BOUNDS = (0, 3, 5)


def rows() -> Iterator[dict[str, int]]:
    yield from ({"row": number} for number in range(6))


def test_every_slice_is_given_the_rows_of_the_first() -> None:
    """Two a micro-batch, as a script may take them."""
    cutting = Cutting(BOUNDS)
    again = iter(RepeatedRows(rows(), cutting))
    taken = []
    for number in range(4):
        with cutting.at(number):
            taken.append([next(again)["row"], next(again)["row"]])
    assert taken == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_end_of_the_data_and_what_an_iterator_has_besides_are_handed_on() -> None:
    class Counting:
        left = 0

        def __next__(self) -> Any:
            raise StopIteration

    cutting = Cutting(BOUNDS)
    again = RepeatedRows(Counting(), cutting)  # type: ignore[arg-type]
    assert again.left == 0
    with cutting.at(0), pytest.raises(StopIteration):
        next(again)


def test_reports_of_slices_add_up_with_the_last() -> None:
    reports = Reports()
    first = {
        "pair": torch.tensor([2.0, 10.0]),
        "mean": torch.tensor(0.5),
        "tuple": (torch.tensor(1.0), torch.tensor(10)),
    }
    second = {
        "pair": torch.tensor([3.0, 10.0]),
        "mean": torch.tensor(0.25),
        "tuple": (torch.tensor(2.0), torch.tensor(10)),
    }
    assert reports.add(first, is_last=False) == []
    (joined,) = reports.add(second, is_last=True)
    assert joined["pair"].tolist() == [5.0, 10.0]
    assert float(joined["mean"]) == 0.75
    assert [float(one) for one in joined["tuple"]] == [3.0, 10.0]
    assert first["pair"].tolist() == [2.0, 10.0], "a script's own report stays as it is"
    assert reports.add(first, is_last=True)[0]["pair"].tolist() == [2.0, 10.0]


def test_rows_are_cut_and_losses_padded_by_the_slice_that_is_computed() -> None:
    cutting = Cutting(BOUNDS)
    tokens, mask = torch.arange(10).view(2, 5), torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(1)
    assert cutting.cut(tokens) is tokens, "outside of a slice"
    with cutting.at(3, stage=2) as now:
        assert now == (1, 1, 2)
        assert cutting.cut(tokens).tolist() == [[3, 4], [8, 9]]
        assert cutting.cut(mask).tolist() == [[[[False, False, False, False, True], [False] * 5]]]
        hidden = torch.zeros(5, 2, 8)
        assert cutting.cut(hidden) is hidden
        assert cutting.cut(None) is None
        assert cutting.pad(torch.ones(2, 2)).tolist() == [[0, 0, 0, 1, 1]] * 2
        with pytest.raises(RuntimeFault, match=r"the last stage returned \(2, 5\), but with slices .* \(batch, 2\)"):
            cutting.pad(torch.ones(2, 5))
        with pytest.raises(AssertionError, match="is still computed"), cutting.at(0):
            pass
    with pytest.raises(AssertionError, match="no slice is computed now"):
        cutting.span  # noqa: B018
