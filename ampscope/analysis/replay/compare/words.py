"""The sentences of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ampscope.analysis.replay.compare.results import Divergence
from ampscope.analysis.words.number_words import number
from ampscope.analysis.words.wording import op_in_words
from ampscope.trace.schema import ENTRY_NODES

#: Names that a sentence lists one by one.
_LISTED = 3
#: Digits that tell any two float64 apart.
_EXACT = 17


def listed(names: Sequence[str], one: str = "module") -> str:
    """``a``, ``a and b``, ``a, b, c and 4 more modules``."""
    if len(names) <= _LISTED:
        return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    more = len(names) - _LISTED
    kinds = one.replace("kind", "kinds", 1) if one.startswith("kind") else f"{one}s"
    return f"{', '.join(names[:_LISTED])} and {more:,} more {one if more == 1 else kinds}"


def counted(number: int, one: str) -> str:
    """``1 op``, ``3 ops``, ``2 batches``."""
    if number == 1:
        return f"{number:,} {one}"
    return f"{number:,} {one}es" if one.endswith("ch") else f"{number:,} {one}s"


def ops_listed(ops: Iterable[str]) -> str:
    """``mm, add and a cast``; each with how often it is there, as in ``3 add``."""
    names: dict[str, int] = {}
    for op in ops:
        word = op_in_words(op)
        names[word] = names.get(word, 0) + 1
    return listed([name if count == 1 else f"{count:,} {_plural(name)}" for name, count in names.items()], "kind of op")


def _plural(name: str) -> str:
    """``casts`` for ``a cast``; the name of an op has none."""
    article, _, noun = name.partition(" ")
    return f"{noun}s" if noun and article in ("a", "an") else name


def place(module: str) -> str:
    """``in blocks.0``, or where code outside every module runs."""
    return f"in {module}" if module else "outside the modules"


def places(modules: Sequence[str]) -> str:
    """``in a, b and 3 more modules``."""
    named = [each or "the code outside the modules" for each in modules]
    return f"in {listed(named)}"


def numbers(one: float, other: float) -> tuple[str, str]:
    """Two numbers, with as many digits as show that they differ."""
    shown = ((number(one, digits), number(other, digits)) for digits in range(4, _EXACT))
    return next((texts for texts in shown if texts[0] != texts[1]), (number(one, _EXACT), number(other, _EXACT)))


def unlike_in_words(found: Divergence) -> str:
    """``NaN in A, 3.13 in B``; empty where the numbers that part are both finite, or not known."""
    return ", ".join(f"{number(value)} in {side}" for value, side in zip(found.unlike, "AB", strict=False))


def parted_in_words(found: Divergence) -> str:
    """Where the numbers part, in a sentence."""
    steps = f"step {found.step:,}" + (f" (step {found.other_step:,} in B)" if found.other_step != found.step else "")
    steps += f" of optimizer {found.optimizer}" if found.optimizer else ""
    if not found.op:
        return f"The curves part at {steps}; no trace that both have tells with which op."
    what = f"with {op_in_words(found.op)} {place(found.module)}"
    if found.op in ENTRY_NODES:
        what = f"with {op_in_words(found.op)} {place(found.module)}, before anything is computed"
    apart = f": {number(found.error)} of the largest magnitude apart" if found.error is not None else ""
    if found.error is not None and math.isinf(found.error):
        apart = f": {unlike_in_words(found) or 'not finite in one of them'}"
    alone = ", which A alone runs" if found.other_seq is None else ", which B alone runs" if found.seq is None else ""
    return f"The numbers part at {steps} {what}{alone if found.traced else ''}{apart}."
