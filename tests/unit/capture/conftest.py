"""Models are trained in this process; see `tests.support.training.fixtures`."""

from __future__ import annotations

from tests.support.training.fixtures import alone, quiet_process, strict_guards, two_ranks, watch
from tests.support.training.guarded_training import modes_removed, unwatched_state

__all__ = ["alone", "modes_removed", "quiet_process", "strict_guards", "two_ranks", "unwatched_state", "watch"]
