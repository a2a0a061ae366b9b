"""Draws what the questions of a fleet cost against its size: ``python benchmarks/large_traces/fleet_plot.py JSON SVG``.

Of what ``big_fleet.py --sweep`` has measured: seconds of the processor, asked a second time, by the number of runs, by
the number of step rows in 100 runs, and for the ranges of one run by its op rows; both axes are logarithmic.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, PANEL, DEEP, APART = 1020, 330, 60, 40, 270, 230, 60
#: Readable on light and on dark ground.
INK, COLOURS = "#808890", {"duckdb": "#2f86d6", "spark": "#dd7a1f"}
NAMES = {"duckdb": "DuckDB", "spark": "Spark"}
#: Powers of ten at the ends of the axis of seconds.
LOW, HIGH = -1, 3


def picture(measured: dict[str, Any]) -> str:
    """The picture, as SVG."""
    rows = measured["fleet"]
    runs = [each for each in rows if (each["ranks"], each["steps"]) == (1, 200)]
    deep = [each for each in rows if (each["ranks"], each["runs"]) == (1, 100)]
    panels = (
        ("fleet: runs of 200 steps", "runs", runs),
        ("fleet: step rows in 100 runs", "rows", deep),
        ("ranges of one run: op rows", "rows", measured["ranges"]),
    )
    drawn = [
        *(line for number, panel in enumerate(panels) for line in _panel(LEFT + number * (PANEL + APART), *panel)),
        _text(LEFT - 44, TOP - 18, "seconds of the processor", anchor="start"),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    title = "<title>What the questions of a fleet cost, with DuckDB and with Spark</title>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img">', title, *drawn, "</svg>\n"])


def _panel(left: int, words: str, size_in: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    sizes = [row[size_in] for row in rows]
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))

    def across(size: float) -> float:
        return left + PANEL * (math.log10(size) - low) / (high - low)

    for power in range(low, high + 1):
        yield _line(across(10**power), TOP, across(10**power), TOP + DEEP)
        yield _text(across(10**power), TOP + DEEP + 18, _short(10**power))
    for power in range(LOW, HIGH + 1):
        yield _line(left, _down(10.0**power), left + PANEL, _down(10.0**power))
        yield _text(left - 6, _down(10.0**power) + 4, f"{10.0**power:,g}", anchor="end")
    yield _text(left + PANEL / 2, TOP + DEEP + 40, words)
    for engine, colour in COLOURS.items():
        points = [(across(size), _down(row[engine]["again_processor"])) for size, row in zip(sizes, rows, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points)
        x, y = points[0]
        yield f'<text x="{x:.1f}" y="{y - 12:.1f}" fill="{colour}">{NAMES[engine]}</text>'


def _short(size: int) -> str:
    return f"{size // 1_000_000:,} M" if size >= 1_000_000 else f"{size:,}"


def _down(seconds: float) -> float:
    return TOP + DEEP * (HIGH - math.log10(seconds)) / (HIGH - LOW)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{INK}" stroke-opacity="0.25"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())))
