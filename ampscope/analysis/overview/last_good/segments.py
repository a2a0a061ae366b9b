"""Whether the run was resumed shortly before an incident, and what was otherwise then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.overview.last_good.unusual import FIRST
from ampscope.analysis.results import Move, MoveKind
from ampscope.trace.manifest import Manifest

#: Attempts before an incident in which a resume is told.
LOOKBACK = 20
#: The score of a resume in which nothing else is known to be otherwise.
_PLAIN = 10.0
#: Changes that are told one by one.
_NAMED = 2


def resumed(manifest: Manifest, good: GoodSteps) -> Iterator[Move]:
    """The newest resume, if it was in the steps before an incident; each good step since makes it less unusual."""
    segments, steps = good.window.ints("segment"), good.window.ints("step")
    begins = np.flatnonzero(np.diff(segments) != 0) + 1
    if not begins.size or segments.size - int(begins[-1]) > LOOKBACK:
        return
    place = int(begins[-1])
    number, step = int(segments[place]), int(steps[place])
    known = 0 <= number < len(manifest.segments)
    changed = manifest.segments[number].changed if known else {}
    since = int(((steps >= step) & (steps <= good.calm) & good.good).sum())
    facts = [f"{name} {_word(was)}, now {_word(now)}" for name, (was, now) in changed.items()]
    more = f" and {len(facts) - _NAMED:,} more" if len(facts) > _NAMED else ""
    what = f" with {'; '.join(facts[:_NAMED])}{more}" if facts else ""
    first = next(iter(changed.values()), (None, None))
    yield Move(
        kind=MoveKind.SEGMENT,
        text=f"the run was resumed at step {step:,}{what}",
        before=_word(first[0]) if changed else str(number - 1),
        after=_word(first[1]) if changed else str(number),
        unit="setting" if changed else "segment",
        score=(FIRST if changed else _PLAIN) / (1 + since),
        seen=int(good.good[:place].sum()),
        step=step,
        name=next(iter(changed), ""),
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
