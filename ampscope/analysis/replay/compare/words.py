"""The sentences of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ampscope.analysis.words.wording import op_in_words

#: Names that a sentence lists one by one.
_LISTED = 3


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


def number(value: float) -> str:
    """A number short enough for a sentence."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.3g}"
