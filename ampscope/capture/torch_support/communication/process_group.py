"""Reads from the default process group, without communicating, who this rank is and whether anything was sent."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ampscope.capture.torch_support.communication.ballot import Ballot
from ampscope.capture.torch_support.guard import Suppressed

_is_available = dist.is_available()


def is_joined() -> bool:
    """Whether there is a process group."""
    return default_group() is not None


def default_group() -> Any | None:
    """The process group of all ranks; None where there is none."""
    return dist.distributed_c10d._world.default_pg if _is_available else None


def rank_of() -> tuple[int, int] | None:
    """This process's rank and how many there are; None without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_joined() else None


def agreed(key: str, proposal: str) -> str | None:
    """Returns the answer of the first rank that asked under ``key``, by the key-value store at which the ranks met.

    One exchange with the store, which waits for no other rank.

    Args:
        key: The question.
        proposal: What this rank would answer; not empty.

    Returns:
        The answer, the same on every rank; None where there is no store.
    """
    with Suppressed():  # not every backend has a store, and it may be gone with the process that held it
        found: Any = dist.distributed_c10d._get_default_store().compare_set(key, "", proposal)
        return str(found, "utf-8") if isinstance(found, bytes) else str(found)
    return None


def ballot(key: str) -> Ballot | None:
    """Makes a ballot by which the ranks of the default process group decide alike; None where there is no store for it.

    Args:
        key: The same on every rank.
    """
    joined = rank_of()
    if joined is None:
        return None
    with Suppressed():  # see `agreed`
        return Ballot(dist.distributed_c10d._get_default_store(), key, *joined)
    return None


def collectives_so_far() -> int | None:
    """How many collectives this rank has begun, in all its groups; None where that is not known.

    Only the difference between two moments means anything.
    """
    if not is_joined():
        return 0
    with Suppressed():  # not every backend counts
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        counts: list[int] = [group._get_sequence_number_for_group() for group in groups]
        return sum(counts)
    return None


def renumbered(rank: int, world_size: int) -> str:
    """Returns a warning where the process group knows this process by another rank or world size; empty otherwise."""
    now = rank_of()
    if now is None or now == (rank, world_size):
        return ""
    return (
        f"this process is rank {now[0]} of {now[1]} by its process group, and was rank {rank} of {world_size} "
        f"when it was watched; call ampscope.watch after init_process_group, so that all ranks share one run"
    )
