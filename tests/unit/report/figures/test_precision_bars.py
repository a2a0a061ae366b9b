"""The bars of what ran in which dtype."""

from __future__ import annotations

from ampscope.analysis.precision.precision import Precision, PrecisionRow, Share
from ampscope.report.figures.precision_bars import module_bars, step_bars
from ampscope.report.html.bars_svg import share_bars_html
from tests.support.scenes import HOSTILE


def row(name: str, **ops: int) -> PrecisionRow:
    shares = tuple(Share(dtype=dtype, ops=number, bytes=1024) for dtype, number in ops.items())
    return PrecisionRow(name=name, kind="", shares=shares)


def test_the_narrowest_dtype_stands_first_in_every_bar() -> None:
    (bar,) = module_bars([row("fc", float32=3, int8=1, float16=6)], most=9).bars
    assert [part.words for part in bar.parts] == ["float16 60 %", "float32 30 %", "int8 10 %"]
    assert [part.is_labelled for part in bar.parts] == [True, True, False]


def test_a_part_says_how_much_it_is() -> None:
    (bar,) = module_bars([row("", float16=1, float32=3)], most=9).bars
    assert bar.name == "outside modules"
    assert bar.parts[0].hover == "float16 25 %: 1 op, 1 KiB written"


def test_bytes_are_another_measure() -> None:
    bars = module_bars([row("fc", float16=1, float32=3)], most=9, by_bytes=True)
    assert [part.share for part in bars.bars[0].parts] == [0.5, 0.5]
    assert "bytes" in bars.unit


def test_what_has_no_room_is_counted() -> None:
    bars = module_bars([row(f"block{number}", float16=1) for number in range(9)], most=4)
    assert len(bars.bars) == 4
    assert "share of the ops; 5 more modules not shown" in share_bars_html(bars)


def test_the_whole_step_comes_first() -> None:
    seen = Precision(step=3, total=row("", float16=1), modules=(row("fc", float16=1),))
    assert [bar.name for bar in step_bars(seen).bars] == ["the whole step", "fc"]


def test_names_of_modules_and_dtypes_are_text() -> None:
    drawn = share_bars_html(module_bars([row(HOSTILE, **{"<b>bold": 1})], most=9))
    assert "<script" not in drawn
    assert "<b>bold" not in drawn
