"""The verdict on a loss scale for the terminal: one sentence, what to do, and what is lost at which scale."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.scale.answer import Recommendation, ScaleAnswer
from ampscope.analysis.scale.window import ScaleWindow
from ampscope.analysis.words import in_words
from ampscope.report import numbers
from ampscope.report.precision_words import code as scaler_code
from ampscope.report.precision_words import in_sentences, sentences
from ampscope.report.safe_text import visible
from ampscope.report.terminal.text_blocks import code, heading, indented, prose

#: Parameters that are named.
_NAMED = 8


def as_text(answer: ScaleAnswer) -> RenderableType:
    """The whole answer."""
    return Group(*_blocks(answer))


def _blocks(answer: ScaleAnswer) -> Iterator[RenderableType]:
    yield prose(answer.sentence)
    if answer.recommendation is not None:
        yield from _advice(answer.recommendation)
    if answer.simulated is not None:
        yield heading("With the settings you asked for")
        yield prose(" ".join(in_sentences(answer.simulated)))
        yield code(scaler_code(answer.simulated.rules))
    yield heading("Between which scales gradients fit float16")
    yield from _window(answer.window, answer.current)


def _advice(advice: Recommendation) -> Iterator[RenderableType]:
    yield heading("What to do")
    yield prose(f"{advice.text} {advice.reason}")
    text = scaler_code(advice.rules) if advice.rules is not None else advice.code
    if text:
        yield code(text)


def _window(window: ScaleWindow, current: float | None) -> Iterator[RenderableType]:
    for each in sentences(window):
        yield prose(each)
    if not window.at_scale:
        return
    yield Text()
    yield indented(_losses(window, current))
    yield Text()
    yield indented(_parameters(window))


def _losses(window: ScaleWindow, current: float | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("loss scale", "flushed to zero", "subnormal", "overflow"):
        table.add_column(column, justify="right")
    for each in window.at_scale:
        shares = (each.lost_share, each.subnormal_share, each.overflow_share)
        style = "bold" if each.scale == current else ""
        now = " (now)" if each.scale == current else ""
        table.add_row(in_words(each.scale) + now, *(numbers.share(part, narrow=True) for part in shares), style=style)
    return table


def _parameters(window: ScaleWindow) -> RenderableType:
    asked = [one for one in window.parameters if one.passes_half]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("gradient of", overflow="fold")
    for column in ("smallest scale", "largest scale", "zero", "subnormal now"):
        table.add_column(column, justify="right")
    for one in asked[:_NAMED]:
        ends = ("not known" if end is None else in_words(end) for end in (one.low, one.high))
        below = numbers.share(one.subnormal_share, narrow=True, missing="not measured")
        table.add_row(Text(visible(one.parameter)), *ends, numbers.share(one.zero_share, narrow=True), below)
    more = len(asked) - _NAMED
    return Group(table, Text(f"and {more:,} more")) if more > 0 else table
