"""Pictures of schedules and of fronts."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.front import FrontPoint, lay_out_front
from bpipe.draw.picture import lay_out, render_svg, stack


def test_halves_lie_below_each_other() -> None:
    halves = [
        lay_out(build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance))), text)
        for balance, text in (("none", "without"), ("bpipe", "with"))
    ]
    both = stack(halves)
    assert (both.width, both.height) == (max(half.width for half in halves), sum(half.height for half in halves))
    assert len(both.shapes) == sum(len(half.shapes) for half in halves)
    titles = [word for word in both.words if word.text.startswith("1f1b: 4 ranks")]
    assert [word.text.rsplit(", ", 1)[1] for word in titles] == ["without", "with"]
    assert titles[1].y - titles[0].y == halves[0].height
    evictions = [word for word in both.words if re.fullmatch(r"E\d", word.text)]
    assert [word.text for word in evictions] == ["E1", "E3", "E5"], "those of the paper's figure 4"
    assert all(word.y > halves[0].height for word in evictions), "the upper half has no transfers"
    ElementTree.fromstring(render_svg(both))


@pytest.mark.parametrize("number", [1, 5, 12])
def test_a_front_is_drawn_to_scale_and_its_winner_is_ringed_and_numbered(number: int) -> None:
    points = [FrontPoint((20 + 4 * place) * 2**30, 9.0 / (place + 1), f"group {place % 5}") for place in range(number)]
    picture = lay_out_front(points, 50 * 2**30, number - 1)
    markers = [shape for shape in picture.shapes if shape.style.startswith("group-") and shape.points[0][1] < 400]
    centres = [[sum(values) / len(values) for values in zip(*marker.points, strict=True)] for marker in markers]
    assert len(markers) == number
    assert [x for x, _ in centres] == sorted(x for x, _ in centres), "more memory is further to the right"
    assert [y for _, y in centres] == sorted(y for _, y in centres), "less time is further down"
    if number > 2:
        steps = [after[0] - before[0] for before, after in itertools.pairwise(centres)]
        assert max(steps) - min(steps) < 1e-6
    (ring,) = (shape for shape in picture.shapes if shape.style == "winner")
    assert max(abs(x - centres[-1][0]) for x, _ in ring.points) == pytest.approx(10)
    assert {str(number), "50.0 GiB per device"} <= {word.text for word in picture.words}
    ElementTree.fromstring(render_svg(picture))
    with pytest.raises(ValueError, match="no point to draw"):
        lay_out_front([], 2**30, None)
