"""On which ranks of a job healthy steps are traced: what ``watch(ranks=...)`` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampscope.errors import WatchError


def sampled_ranks(asked: Any, world_size: int) -> tuple[int, ...]:
    """The ranks asked for, ascending.

    Args:
        asked: ``"all"``, a number of ranks that are spread evenly from rank 0 on, or the ranks themselves.
        world_size: How many ranks there are.

    Raises:
        WatchError: It is none of these, or names a rank that the job does not have.
    """
    if asked == "all":
        return tuple(range(world_size))
    if _is_number(asked) and asked > 0:
        count = min(asked, world_size)
        return tuple(number * world_size // count for number in range(count))
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked or not all(map(_is_number, asked)):
        raise WatchError(f'ranks={asked!r}: give ranks such as [0, 3], how many of them, or "all"')
    missing = [rank for rank in asked if not 0 <= rank < world_size]
    if missing:
        has = f"the ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 alone"
        raise WatchError(f"ranks={asked!r}: this job has {has}, as far as its launcher and process group tell")
    return tuple(sorted(set(asked)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
