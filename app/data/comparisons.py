"""Two runs, or two steps, against each other; a comparison is kept until one of the two has other rows."""

from __future__ import annotations

from ampscope.analysis.replay.compare.comparison import comparison
from ampscope.analysis.replay.compare.results import Comparison
from ampscope.analysis.replay.compare.sides import Opened
from data.cache import cached
from data.run_results import grown
from data.run_snapshot import RunSnapshot


@cached(grown, entries=16)
def comparison_of(one: RunSnapshot, other: RunSnapshot, step: int | None, other_step: int | None) -> Comparison:
    """Compares two runs, or a step of each, on the ranks that the snapshots look at."""
    return comparison(Opened(one.run, one.rank, step), Opened(other.run, other.rank, other_step))
