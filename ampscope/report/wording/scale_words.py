"""A loss scale in words: at which ones gradients fit float16, and what would have been with another scaler."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.scale.what_if import ScalerRules, WhatIf
from ampscope.analysis.scale.window import ScaleWindow
from ampscope.analysis.words import in_words
from ampscope.report import numbers
from ampscope.report.wording.precision_words import several


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


def in_sentences(answer: WhatIf) -> list[str]:
    """The answer in words, and how sure it is."""
    skipped, was = (numbers.count(number, "step") for number in (answer.skipped, answer.was_skipped))
    same = answer.skipped == answer.was_skipped
    sentences = [
        f"{skipped} would have been skipped"
        + (", as many as were." if same else f"; {was} {'was' if answer.was_skipped == 1 else 'were'}.")
    ]
    if answer.unsaved:
        sentences.append(f"{answer.unsaved:,} of them had a loss that no scale would have saved.")
    if answer.lowest is not None and answer.current is not None:
        sentences.append(
            f"The scale would be {in_words(answer.current)} now, and {in_words(answer.lowest)} at its lowest."
        )
    if answer.proven < answer.steps:
        guessed = numbers.count(answer.steps - answer.proven, "step")
        sentences.append(f"For {guessed} this is an estimate from the steps around; of the others the run proves it.")
    return sentences


def code(rules: ScalerRules) -> str:
    """The scaler to paste."""
    lines = [
        "scaler = torch.amp.GradScaler(",
        f"    init_scale={_exact(rules.init_scale)},",
        f"    growth_factor={_exact(rules.growth_factor)},",
        f"    backoff_factor={_exact(rules.backoff_factor)},",
        f"    growth_interval={rules.growth_interval},",
        ")",
    ]
    if rules.floor:
        lines.append(
            f"# after scaler.update():\nif scaler.get_scale() < {rules.floor:g}:\n    scaler.update({rules.floor:g})"
        )
    return "\n".join(lines)


def _exact(number: float) -> str:
    """Short where that loses nothing: ``65536``, but ``16777216.0``."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
