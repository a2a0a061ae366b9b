"""The curves of two runs over each other: loss, gradient norm and loss scale by step, and what happened when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.numerics.arrays import Curve, thinner
from ampscope.analysis.overview.overview import Overview
from ampscope.report.figures.axis import scale_axis
from ampscope.report.figures.panels import measure_panel, scale_panel
from ampscope.report.figures.stack import Edge, Lane, Panel, Stack, Symbol, at_every_step
from ampscope.report.palette import ALARM, MARK

#: What the two are called.
SIDES = ("A", "B")
#: Points of a curve, and marks of a lane; there are six of each.
_POINTS, _MARKS = 700, 350
_NO_CURVE = Curve()
_NO_EDGE = Edge(symbol=Symbol.UP)


def overlay_stack(one: Overview, other: Overview | None = None, *, lines: Sequence[int] = ()) -> Stack:
    """The curves of one run, and of another over them where there is one.

    Args:
        one: A.
        other: B.
        lines: Steps at which a line is drawn: those that are compared.
    """
    return Stack(
        label="Loss, gradient norm and loss scale of both by optimizer step.",
        panels=tuple(_panels(one, other)),
        lanes=(*_lanes(one, SIDES[0]), *(_lanes(other, SIDES[1]) if other is not None else ())),
        lines=tuple(lines),
    )


def _panels(one: Overview, other: Overview | None) -> Iterator[Panel]:
    def theirs(curve: str) -> Curve | None:
        found: Curve | None = None if other is None else getattr(other, curve)
        return found

    if _is_seen(one.loss, theirs("loss")):
        yield _measure(one.loss, theirs("loss"), "loss", log=False)
    if _is_seen(one.grad_norm, theirs("grad_norm")):
        norm = _measure(one.grad_norm, theirs("grad_norm"), "gradient norm", log=True)
        yield replace(norm, name="gradient norm (L2, without the loss scale)")
    if _is_seen(one.log2_scale, theirs("log2_scale")):
        mine, also = _drawn(one.log2_scale), _drawn(theirs("log2_scale"))
        panel = replace(scale_panel(mine), axis=scale_axis(_both(mine, also)), name="loss scale (powers of two)")
        yield _overlaid(replace(panel, below=_NO_EDGE), None if other is None else also)


def _is_seen(mine: Curve, theirs: Curve | None) -> bool:
    return bool(mine.steps) or (theirs is not None and bool(theirs.steps))


def _measure(mine: Curve, theirs: Curve | None, name: str, *, log: bool) -> Panel:
    """A value of both on one axis; what is not finite stands in the lanes."""
    mine, also = _drawn(mine), _drawn(theirs)
    whole = measure_panel(replace(_both(mine, also), nonfinite=()), name, "", log=log)
    if whole.axis.log:
        mine, also = _positive(mine), _positive(also)
    return _overlaid(replace(whole, curve=mine, above=_NO_EDGE, below=_NO_EDGE), None if theirs is None else also)


def _overlaid(panel: Panel, theirs: Curve | None) -> Panel:
    return panel if theirs is None else replace(panel, other=theirs, sides=SIDES)


def _drawn(curve: Curve | None) -> Curve:
    return _NO_CURVE if curve is None else thinner(curve, _POINTS)


def _both(mine: Curve, theirs: Curve) -> Curve:
    """The values of both, for an axis."""
    return Curve(steps=(*mine.steps, *theirs.steps), values=(*mine.values, *theirs.values))


def _positive(curve: Curve) -> Curve:
    """What has a place on a logarithmic axis; the curve is broken where a value has none."""
    kept = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value > 0]
    zeros = [step for step, value in zip(curve.steps, curve.values, strict=True) if value <= 0]
    return replace(
        curve,
        steps=tuple(step for step, _ in kept),
        values=tuple(value for _, value in kept),
        nonfinite=tuple(sorted({*curve.nonfinite, *zeros})),
    )


def _lanes(seen: Overview, side: str) -> Iterator[Lane]:
    """What one of the two skipped, and where a value of it was not finite."""
    bad = sorted({*seen.loss.nonfinite, *seen.grad_norm.nonfinite})
    lanes = ((bad, "NaN or inf", Symbol.UP, ALARM), (list(seen.skips), "skipped", Symbol.STROKE, MARK))
    for steps, name, symbol, color in lanes:
        if steps:
            shown = steps[:: max(1, -(-len(steps) // _MARKS))]
            yield Lane(
                name=f"{side}: {name}",
                symbol=symbol,
                color=color,
                spans=at_every_step(shown),
                hovers=((f"{side}: {name}",),) * len(shown),
            )
