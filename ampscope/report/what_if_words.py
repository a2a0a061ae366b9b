"""What would have been with another scaler, in words, and that scaler as code."""

from __future__ import annotations

from ampscope.analysis.scale.what_if import ScalerRules, WhatIf
from ampscope.analysis.words import in_words
from ampscope.report import numbers


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
