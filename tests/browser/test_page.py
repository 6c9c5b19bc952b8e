"""The report in a real browser: it draws, zooms, and answers the pointer and keys, without messages or requests."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from bpipe.record.report.output.page import render
from bpipe.schedule.files.text import read_action
from tests.browser.conftest import Page
from tests.browser.sample import SAVED, action_row, make_view

MIB = 2**20
MISSING = 5
LANES = {"F": "compute", "B": "compute", "EVICT": "away", "RETURN": "away", "LOAD": "towards", "HOST": "towards"}


@pytest.fixture(scope="module")
def view() -> dict[str, Any]:
    return make_view(8, 16, missing=(MISSING,), iterations=2)


@pytest.fixture(scope="module")
def path(view: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render(view), encoding="utf-8")
    return file


@pytest.fixture
def page(driver: Any, path: Path) -> Page:
    return Page(driver, path)


def at(
    page: Page, view: dict[str, Any], text: str, rank: int, side: str = "measured", share: float = 0.5
) -> tuple[float, float]:
    """Return an action's position in the last iteration, `share` of its duration after its start."""
    action = read_action(text)
    _, start, end, *_ = action_row(view, rank, side, action)
    return page.place(rank, side, LANES[action.kind.value], start + share * (end - start))


def near(first: tuple[int, ...], second: tuple[int, ...], tolerance: int = 12) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def held(view: dict[str, Any], rank: int, side: str, time: float) -> int:
    return [num_bytes for start, num_bytes in view["iterations"][-1]["ranks"][rank][side]["memory"] if start <= time][
        -1
    ]


def longest_wait(view: dict[str, Any]) -> tuple[str, float, float]:
    """Return the transfer that stage 0 waited for longest, when the wait ended, and its duration."""
    row = max(view["iterations"][-1]["ranks"][0]["measured"]["actions"], key=lambda action: action[3])
    assert row[3] > 0.005
    return row[0], row[2], row[3]


def ms(text: str) -> float:
    """Convert a duration that the page shows to milliseconds."""
    number, unit = text.split()
    return float(number) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]


def facts(tip: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in tip.splitlines()[1:])


# --- It draws
# ----------------------------------------------------------------------------------------------------------------------


def test_actions_are_drawn_where_they_are_and_gaps_are_not(page: Page, view: dict[str, Any]) -> None:
    page.show(0, 0.2)
    assert near(page.colour(*at(page, view, "0F1", 0, share=0.2)), page.shade("forward"))
    assert near(page.colour(*at(page, view, "0EVICT4", 0)), page.shade("away"))
    last_forward = action_row(view, 0, "measured", read_action("0F7"))
    assert near(page.colour(*page.place(0, "measured", "compute", last_forward[2] + 0.02)), page.shade("lane")), (
        "a bubble is drawn empty"
    )
    page.show(0.2, 0.5)
    assert near(page.colour(*at(page, view, "0LOAD4", 0)), page.shade("towards"))
    forward, backward = (page.colour(*at(page, view, text, 4, share=0.1)) for text in ("4F6", "4B3"))
    assert sum(forward) - sum(backward) > 60, "forwards and backwards differ in lightness, not in hue alone"


def test_the_memory_curve_is_as_high_as_what_is_held(page: Page, view: dict[str, Any]) -> None:
    """The band's middle is under the curve of a full rank, and above that of a rank with one of five micro-batches."""
    time = 0.15
    assert held(view, 0, "measured", time) == 5 * SAVED
    assert near(page.colour(*page.place(0, "measured", "memory", time)), page.shade("held"))
    early = action_row(view, 0, "measured", read_action("0F0"))[2] * 0.5
    assert held(view, 0, "measured", early) == SAVED
    x, y = page.place(0, "measured", "memory", early)
    assert near(page.colour(x, y), page.shade("card"))
    around = page.colours(x, y, 13, 50)
    for name in ("bound", "predicted", "held"):
        assert any(near(colour, page.shade(name), 45) for colour in around), name


def test_waits_are_seen(page: Page, view: dict[str, Any]) -> None:
    _, end, waited = longest_wait(view)
    page.show(end - 3 * waited, end + 3 * waited)
    x, y = page.place(0, "measured", "compute", end - waited / 2)
    colours = page.colours(x, y, 25, 1)
    assert any(near(colour, page.shade("wait"), 30) for colour in colours)
    assert any(near(colour, page.shade("wait-line"), 40) for colour in colours), "stripes, visible without colour"


@pytest.mark.parametrize(
    ("name", "value"), [("sides", "measured"), ("sides", "simulated"), ("size", "small"), ("size", "medium")]
)
def test_what_is_shown_can_be_chosen(page: Page, name: str, value: str) -> None:
    before = page.picture()
    page.choose(name, value)
    assert page.picture() != before
    assert page.complaints() == []


def test_the_tables_say_what_the_view_says(page: Page, view: dict[str, Any]) -> None:
    rows = page.run(
        "return [...document.querySelectorAll('#stages tbody tr')].map((row) => [...row.cells].map((cell) => "
        "cell.textContent))"
    )
    assert [row[0] for row in rows] == [str(stage["stage"]) for stage in view["stages"]]
    assert rows[0][2:4] == ["5 (5)", f"{5 * SAVED / MIB:.2f} MiB"]
    assert rows[MISSING][2:4] == ["– (5)", "–"]
    assert page.run("return [...document.querySelectorAll('th')].every((cell) => cell.scope)")
    assert view["differences"][0]["beside"] in page.text("#differences")
    assert (
        page.run("return [...document.querySelectorAll('#answers li')].map((item) => item.textContent)")
        == view["answers"]
    )
    figures = page.run(
        "return [...document.querySelectorAll('#figures > div')].map((figure) => [...figure.children].map((part) => "
        "part.textContent))"
    )
    assert figures == view["figures"]


def test_the_bars_are_as_high_as_the_stages_are_full(page: Page, view: dict[str, Any]) -> None:
    script = (
        "return [...document.querySelectorAll(`#bars rect.${arguments[0]}`)].map((bar) => "
        "Number(bar.getAttribute('height')))"
    )
    for name, key in (("before", "unbalanced_bytes"), ("after", "measured_bytes")):
        legend = 12
        heights = [height for height in page.run(script, name) if height != legend]
        sizes = [stage[key] for stage in view["stages"] if stage[key] is not None]
        assert [height / heights[0] for height in heights] == pytest.approx(
            [size / sizes[0] for size in sizes], rel=1e-3
        )
    assert page.run("return document.querySelector('#bars svg').getAttribute('aria-label')").startswith(
        "Bars of saved activations, 8 stages"
    )


def test_measured_bars_of_a_baseline_take_the_place_of_predicted_ones(
    driver: Any, view: dict[str, Any], tmp_path: Path
) -> None:
    compared = deepcopy(view)
    for stage in compared["stages"]:
        stage["baseline_bytes"] = stage["unbalanced_bytes"] // 2
    file = tmp_path / "report.html"
    file.write_text(render(compared), encoding="utf-8")
    page = Page(driver, file)
    title = f"stage 0, without balancing, measured: {compared['stages'][0]['baseline_bytes'] / MIB:.2f} MiB"
    assert page.run("return document.querySelector('#bars rect.before title').textContent") == title
    assert page.run("return document.querySelectorAll('#bars rect[fill]').length") == 0
    assert "without balancing: measured" in page.text("#bars")


def test_a_rank_without_a_record_is_named(page: Page) -> None:
    assert page.text("#missing") == f"Simulated only, because there is no record: stage {MISSING} (no record)."
    assert page.hover(*page.place(MISSING, "measured", "compute", 0.1)) == f"stage {MISSING}: no record of this rank"
    assert "simulated" in page.hover(*page.place(MISSING, "simulated", "compute", 0.25))


# --- It zooms and moves
# -----------------------------------------------------------------------------------------------------------------


def test_the_wheel_zooms_around_the_pointer(page: Page) -> None:
    time = 0.3
    x, y = page.place(0, "measured", "compute", time)
    whole, before = page.range(), page.picture()
    page.wheel(x, y, -400)
    start, end = page.range()
    assert 0 < start < time < end < whole[1]
    assert page.place(0, "measured", "compute", time)[0] == pytest.approx(x, abs=1.5), (
        "the point under the pointer stays in place"
    )
    assert page.picture() != before
    page.wheel(x, y, 400)
    assert page.range() == pytest.approx(whole)
    page.press("0")
    assert page.picture() == before


def test_dragging_zooms_into_the_span(page: Page) -> None:
    from_place, to_place = (page.place(1, "measured", "compute", time) for time in (0.2, 0.3))
    page.drag(from_place, to_place)
    assert page.range() == pytest.approx((0.2, 0.3), abs=0.002)
    page.drag(page.place(1, "measured", "compute", 0.28), page.place(1, "measured", "compute", 0.26), shift=True)
    assert page.range() == pytest.approx((0.22, 0.32), abs=0.002), "with shift it moves"
    assert page.range()[1] - page.range()[0] == pytest.approx(0.1, abs=0.002)


def test_the_keys_do_the_same(page: Page) -> None:
    from selenium.webdriver import Keys

    whole = page.range()
    page.press("+", "+")
    start, end = page.range()
    assert end - start == pytest.approx((whole[1] - whole[0]) * 0.36)
    page.press(Keys.ARROW_RIGHT)
    assert page.range()[0] > start
    page.press("-")
    assert page.range()[1] - page.range()[0] == pytest.approx((end - start) / 0.6)
    page.press("0")
    assert page.range() == pytest.approx(whole)


def opened(driver: Any, view: dict[str, Any], folder: Path, width: int | None = None) -> Page:
    """Open a separate page in a window of this width."""
    file = folder / "page.html"
    file.write_text(render(view), encoding="utf-8")
    page = Page(driver, file)
    if width is not None:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(file.as_uri())
        page.settle()
    return page


def test_the_iteration_of_the_largest_difference_is_shown_first(
    driver: Any, view: dict[str, Any], tmp_path: Path
) -> None:
    """If difference 1 names an iteration, the page opens with it; it once opened with another one."""
    first = view["iterations"][0]["iteration"]
    page = opened(driver, view | {"differences": [view["differences"][0] | {"iteration": first}]}, tmp_path)
    assert page.run("return document.getElementById('iteration').selectedOptions[0].textContent") == str(first)


def test_the_bottleneck_is_in_sight(driver: Any, tmp_path: Path) -> None:
    """The page once showed the first stages of a pipeline that does not fit into the window."""
    page = opened(driver, make_view(12, 12), tmp_path)
    top, height, whole = page.run(
        "const t = document.getElementById('timeline'); return [t.scrollTop, t.clientHeight, t.scrollHeight]"
    )
    assert top > 0
    assert top + height > whole - 20, "the bottleneck is the last stage"


def test_a_telephone_shows_all_of_it(driver: Any, view: dict[str, Any], tmp_path: Path) -> None:
    """At 390 pixels, the names took half of the timeline, and the labels of the bars were five pixels high."""
    page = opened(driver, view, tmp_path, width=390)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    heights = page.run(
        "return [...document.querySelectorAll('#bars text')].map((text) => text.getBoundingClientRect().height)"
    )
    assert min(heights) > 10
    left, right = (page.place(0, "measured", "compute", time)[0] for time in page.range())
    assert right - left > 225


def test_paper_loses_no_column_and_no_rank(driver: Any, view: dict[str, Any], tmp_path: Path) -> None:
    """Content outside of the scrolled view was not printed."""
    page = opened(driver, view, tmp_path)
    paper = {"width": 1047, "height": 718, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", paper)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.run("dispatchEvent(new Event('beforeprint'))")
    page.settle()
    try:
        assert page.run(
            "return document.querySelector('#stages table').scrollWidth <= "
            "document.getElementById('stages').clientWidth"
        )
        assert page.run("return document.documentElement.scrollWidth") <= 1047
        whole = page.run("return document.getElementById('extent').style.height")
        assert page.run("return document.getElementById('printed').height") == float(whole.removesuffix("px"))
        drawn = (
            "const c = document.getElementById('printed'); return [...c.getContext('2d').getImageData(0, c.height "
            "- 60, c.width, 60).data]"
        )
        assert len(set(page.run(drawn))) > 10, "the last rank is drawn"
        assert page.run("return getComputedStyle(document.getElementById('timeline')).display") == "none"
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


# --- It answers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rank", "side"),
    [
        ("0F3", 0, "measured"),
        ("0B15", 0, "simulated"),
        ("3B7", 3, "measured"),
        ("7F9", 7, "simulated"),
        ("0LOAD10", 0, "measured"),
        ("1EVICT8", 1, "simulated"),
        ("0HOST4", 7, "measured"),
        ("0RETURN4", 7, "simulated"),
    ],
)
def test_hovering_tells_the_action(page: Page, view: dict[str, Any], text: str, rank: int, side: str) -> None:
    action = read_action(text)
    _, start, end, waited, num_bytes, slot = action_row(view, rank, side, action)
    tip = page.hover(*at(page, view, text, rank, side))
    assert tip.startswith(f"{text}: ")
    assert f"micro-batch {action.microbatch}" in tip.splitlines()[0]
    shown = facts(tip)
    assert shown[f"stage {rank} (rank {rank})"] == side
    assert ms(shown["start"]) == pytest.approx(1e3 * start, abs=2e-3)
    assert ms(shown["duration"]) == pytest.approx(1e3 * (end - start), rel=1e-3)
    assert shown.get("bytes moved", shown.get("bytes saved")) == (
        "–" if num_bytes is None else f"{num_bytes / MIB:.2f} MiB"
    )
    assert shown["host buffer"] == ("–" if slot is None else str(slot))
    if waited > 0:
        assert ms(shown["wait"]) == pytest.approx(1e3 * waited, rel=1e-3)
    else:
        assert shown["wait"] in ("none", "–")
    other_side = "simulated" if side == "measured" else "measured"
    assert ms(shown[f"{other_side} duration"]) > 0, "the other side's duration is shown, too"


def test_hovering_a_wait_tells_for_what(page: Page, view: dict[str, Any]) -> None:
    text, end, waited = longest_wait(view)
    tip = page.hover(*page.place(0, "measured", "compute", end - waited / 2))
    assert tip.splitlines()[0] == f"exposed: computation waits for {text}"
    assert ms(facts(tip)["wait"]) == pytest.approx(1e3 * waited, rel=1e-3)
    transfer = page.hover(*at(page, view, text, 0))
    assert transfer.startswith(f"{text}: ")
    assert ms(facts(transfer)["wait"]) == pytest.approx(1e3 * waited, rel=1e-3)


def test_hovering_the_memory_tells_both_and_the_bound(page: Page, view: dict[str, Any]) -> None:
    time = 0.25
    shown = facts(page.hover(*page.place(2, "measured", "memory", time)))
    for side in ("measured", "simulated"):
        assert shown[side] == f"{held(view, 2, side, time) / MIB:.2f} MiB"
    assert shown["bound"] == f"{5 * SAVED / MIB:.2f} MiB"


def test_the_keys_step_through_actions_and_say_them(page: Page) -> None:
    from selenium.webdriver import Keys

    page.press(Keys.ARROW_DOWN)
    assert page.text("#spoken").startswith("0F0: forward of micro-batch 0, stage 0 (rank 0) measured, start ")
    page.press(".", ".")
    assert page.text("#spoken").startswith("0F2: ")
    page.press(",")
    assert page.text("#spoken").startswith("0F1: ")
    page.press(Keys.ARROW_DOWN)
    assert page.text("#spoken").startswith("0EVICT")
    assert page.tip().startswith("0EVICT")
    page.press(Keys.ESCAPE)
    assert page.tip() == ""


def test_another_iteration_can_be_chosen(page: Page, view: dict[str, Any]) -> None:
    before = page.picture()
    page.choose("iteration", "0")
    assert page.picture() != before
    assert page.range()[1] >= view["iterations"][0]["end_s"] - 1e-6
    assert page.hover(*page.place(0, "measured", "compute", 0.001)).startswith("0F0: ")


# --- It is a good guest
# -----------------------------------------------------------------------------------------------------------------


def test_themes(driver: Any, path: Path) -> None:
    light = Page(driver, path, "light")
    assert light.run("return document.documentElement.dataset.theme") == "light"
    before = light.picture()
    light.run("document.getElementById('theme').click()")
    light.settle()
    assert light.run("return document.documentElement.dataset.theme") == "dark"
    assert light.picture() != before
    assert sum(light.colour(*light.place(0, "measured", "memory", 0.001))) < 200, "the canvas too"
    light.run("document.getElementById('theme').click(); localStorage.clear()")
    dark = Page(driver, path, "dark")
    assert dark.run("return document.documentElement.dataset.theme") == "dark"
    assert dark.run("return getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 248)"


def test_everything_with_a_name_for_those_who_do_not_see_it(page: Page) -> None:
    script = """
        return [...document.querySelectorAll("button, select, input, canvas[tabindex], [role=region]")].filter((element) =>
            !(element.getAttribute("aria-label") || element.getAttribute("aria-labelledby") || element.closest("label")
              || element.textContent.trim() && element.tagName === "BUTTON")).map((element) => element.outerHTML)
    """
    assert page.run(script) == []
    assert page.run("return document.documentElement.lang") == "en"
    assert page.run("return document.title") == page.text("h1")


def test_no_word_to_the_console_and_none_to_the_network(driver: Any, path: Path, view: dict[str, Any]) -> None:
    page = Page(driver, path)
    for time in (0.05, 0.3):
        page.wheel(*page.place(0, "measured", "compute", time), -300)
        page.hover(*page.place(3, "simulated", "compute", time))
    page.choose("sides", "simulated")
    page.run("document.getElementById('theme').click(); localStorage.clear()")
    page.settle()
    assert page.complaints() == []
    assert [address for address in page.requests() if not address.startswith("data:")] == [path.as_uri()]


@pytest.mark.parametrize(
    "change",
    [{"iterations": []}, {"differences": [], "answers": [], "facts": [], "figures": []}, {"stages": []}],
    ids=["no iteration", "nothing to say", "no stage"],
)
def test_a_poor_view_is_still_a_page(driver: Any, view: dict[str, Any], change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render({**view, **change}), encoding="utf-8")
    page = Page(driver, file)
    assert page.complaints() == []
    if change == {"iterations": []}:
        assert "No iteration was recorded" in page.text("main")


@pytest.mark.parametrize(
    "size", [(16, 64), pytest.param((64, 512), marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_a_large_run_stays_usable(driver: Any, size: tuple[int, int], tmp_path: Path, record_property: Any) -> None:
    """The limits are what a user would wait, times five for a busy machine; the timings are printed with -rP."""
    view = make_view(*size)
    file = tmp_path / "report.html"
    text = render(view)
    file.write_text(text, encoding="utf-8")
    page = Page(driver, file)
    whole = page.range()[1]
    for step in range(1, 9):
        page.show(whole / 2 * (1 - 0.5**step), whole / 2 * (1 + 0.5**step))
    _, start, end, *_ = action_row(view, 0, "measured", read_action("0F9"))
    page.show(start - 0.01, end + 0.01)
    assert page.hover(*page.place(0, "measured", "compute", (start + end) / 2)).startswith("0F9: forward")
    timings = page.run("return bpipeTimings")
    zooms = sorted(draw["frame_ms"] for draw in timings["draws"] if draw["why"] == "zoom")
    print(
        f"{size}: {len(text) / 1e6:.1f} MB, first draw {timings['first_draw_ms']:.0f} ms after opening, zooms (ms, to "
        f"the next frame):"
    )
    print(" ".join(f"{zoom:.0f}" for zoom in zooms))
    assert timings["first_draw_ms"] < 15_000
    assert zooms[len(zooms) // 2] < 1_500
    assert page.complaints() == []
    assert not re.search("NaN|undefined", page.text("main"))
