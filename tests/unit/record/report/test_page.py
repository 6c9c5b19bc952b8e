"""The page as text: complete, safe, compact, and equal to its view (its pictures: tests/browser)."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from typing import Any

import pytest

from bpipe.record.report.output.page import NOTHING, TICK_S, column, render
from tests.browser.sample import make_view


class Outline(HTMLParser):
    """Elements, their attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data


def numbers(packed: dict[str, Any]) -> list[int]:
    """What a column says, read as the page's own script reads it."""
    table: list[int] = packed.get("differences", packed.get("values"))
    entries = (
        table * packed["times"]
        if "times" in packed
        else [table[place] for place in packed["of"]]
        if "of" in packed
        else table
    )
    if "differences" not in packed:
        return entries
    total, sums = 0, []
    for entry in entries:
        total += entry
        sums.append(total)
    return sums


@pytest.fixture(scope="module")
def view() -> dict[str, Any]:
    return make_view(4, 6, missing=(2,))


@pytest.fixture(scope="module")
def outline(view: dict[str, Any]) -> Outline:
    return Outline(render(view))


def test_a_title_cannot_end_the_script_or_become_an_element(view: dict[str, Any], outline: Outline) -> None:
    assert "</script>" in view["title"]
    assert outline.texts["title"] == outline.texts["h1"] == view["title"]
    assert json.loads(outline.scripts[1])["title"] == view["title"]
    assert "b" not in {tag for tag, _ in outline.elements}


def test_actions_and_memory_come_back_as_they_were(view: dict[str, Any], outline: Outline) -> None:
    data = json.loads(outline.scripts[1])
    for given, packed in zip(view["iterations"][0]["ranks"], data["iterations"][0]["ranks"], strict=True):
        for side in ("measured", "simulated"):
            if given[side] is None:
                assert packed[side] is None
                continue
            columns = {name: numbers(values) for name, values in data["tracks"][packed[side]].items()}
            names = ("stage", "kind", "microbatch", "start", "length", "wait", "bytes", "slot")
            rows = zip(*(columns[name] for name in names), strict=True)
            for row, (stage, kind, microbatch, start, length, wait, num_bytes, slot) in zip(
                given[side]["actions"], rows, strict=True
            ):
                assert row[0] == f"{stage}{data['kinds'][kind]}{microbatch}"
                assert start * TICK_S == pytest.approx(row[1], abs=TICK_S)
                assert (start + length) * TICK_S == pytest.approx(row[2], abs=TICK_S)
                assert wait * TICK_S == pytest.approx(row[3], abs=TICK_S)
                assert (num_bytes, slot) == tuple(NOTHING if value is None else value for value in row[4:])
            steps = zip(columns["memory_time"], columns["memory_held"], strict=True)
            for (time, held), (given_time, given_held) in zip(steps, given[side]["memory"], strict=True):
                assert time * TICK_S == pytest.approx(given_time, abs=TICK_S)
                assert held == given_held


def test_random_columns_come_back() -> None:
    chance = random.Random(3)
    for _ in range(200):
        values = [chance.randrange(-(10 ** chance.randrange(1, 12)), 10**6) for _ in range(chance.randrange(40))]
        assert numbers(column(values)) == values


def test_a_number_that_is_not_finite_is_refused(view: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({**view, "stages": [{**view["stages"][0], "bubble": float("nan")}]})
