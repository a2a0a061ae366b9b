"""What a soak has tried, and what came of it: a line a part, added up over all tests and processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

Record = Callable[[str, object], None]

_PROPERTY = "soak"


def soaked(record_property: Record, part: str, tried: int, failed: int) -> None:
    """Takes down what a test has tried."""
    record_property(_PROPERTY, [part, tried, failed])


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The lines to print; none where nothing was soaked."""
    tried: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for report in reports:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, list):
                sums = tried[str(value[0])]
                sums[:] = sums[0] + value[1], sums[1] + value[2], sums[2] + report.duration
    rows = [f"{part:<44} {n:>9,.0f} {failed:>9,.0f} {took / 60:>9.1f}" for part, (n, failed, took) in tried.items()]
    return [f"{'part':<44} {'tried':>9} {'failed':>9} {'minutes':>9}", *rows] if rows else []
