#!/usr/bin/env python3
"""Draw the figures of the documentation as svg files.

Usage: scripts/make_figures.py [--output docs/figures]

    schedule   1F1B of 4 stages and 8 micro-batches, without balancing and with it (Kim et al. 2023, figure 4)
    every      every family of schedules at 4 ranks and 8 micro-batches, on the unit grid

Needs no torch.
"""

import argparse
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.picture import lay_out, render_svg, stack
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import peak_counts, plain

ROOT = Path(__file__).resolve().parents[1]


def schedule_svg() -> str:
    """Draw 1F1B without balancing, and below it with balancing."""
    subtitles = {"none": "without balancing", "bpipe": "with balancing"}
    halves = [
        lay_out(build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance))), text)
        for balance, text in subtitles.items()
    ]
    return render_svg(stack(halves))


def every_svg() -> str:
    """Draw all families, one below the other."""
    pictures = []
    for name, family in FAMILIES.items():
        config = ScheduleConfig(name, 4, 8, num_chunks=family.chunks(2)[-1])
        schedule = build(config)
        peak = plain(Fraction(max(peak_counts(schedule)), config.num_chunks))
        bubble = float(iteration_time(schedule, ALIKE).bubble_percent)
        pictures.append(lay_out(schedule, f"at most {peak} micro-batches held, bubble {bubble:.1f} %"))
    return render_svg(stack(pictures))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures", help="default docs/figures")
    options = parser.parse_args()
    try:
        figures = {"schedule": schedule_svg(), "every": every_svg()}
        options.output.mkdir(parents=True, exist_ok=True)
        for name, svg in figures.items():
            file = options.output / f"{name}.svg"
            file.write_text(svg, encoding="utf-8")
            print(file)
    except (ValueError, OSError) as error:
        print(f"make_figures.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
