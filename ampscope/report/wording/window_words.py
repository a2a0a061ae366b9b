"""The loss scales at which gradients fit float16, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.scale.window import ScaleWindow
from ampscope.analysis.words import in_words
from ampscope.report import numbers
from ampscope.report.wording.plan_words import several


def sentences(window: ScaleWindow) -> Iterator[str]:
    """The scales at which all gradients together fit, and what that was counted in."""
    if window.optimizers:
        of = f" This is of optimizer {window.optimizer}." if window.optimizer is not None else ""
        yield f"{several(window.optimizers)}{of}"
    if window.low is None and window.high is None:
        yield f"Not known: {_unknown(window)}"
        return
    yield _ends(window)
    yield _basis(window) if window.at_scale else _unknown(window)


def _ends(window: ScaleWindow) -> str:
    least = "at least " if not window.exact else ""
    low = "not known" if window.low is None else f"{least}{in_words(window.low)}"
    high = "not known" if window.high is None else f"{in_words(window.high)}, above which {window.limited_by} overflows"
    return f"Smallest that saves the gradients, taken together: {low}. Largest that does not overflow: {high}."


def _unknown(window: ScaleWindow) -> str:
    what = "no traced step has counted the exponents of gradients, so nothing is known of what is flushed to zero. "
    return (
        f"{what[0].upper() if window.high is not None else what[0]}{what[1:]}Traced healthy steps count them: every=N."
    )


def _basis(window: ScaleWindow) -> str:
    steps = numbers.count(len(window.steps), "step")
    sentences = [f"Counted in {steps}, up to step {window.steps[-1]:,}."]
    if window.zero_share:
        zeros = numbers.share(window.zero_share)
        sentences.append(
            f"{zeros} of the values were exactly zero: truly so or flushed, which the trace does not tell."
        )
    if window.unmeasured:
        sentences.append(f"Not measured: the gradients of {numbers.count(window.unmeasured, 'parameter')}.")
    return " ".join(sentences)
