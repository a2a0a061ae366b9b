"""The process group tells without communicating which rank this is, what reduces gradients, how ranks decide alike.

They decide by the key-value store through which they met: no collective, no endless wait. Every rank writes its vote
and reads those of the others. What they come to is written once, by the first that knows, and holds for all: a rank
that has waited in vain, or is not there, cannot leave some of them with another decision.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ampscope.capture.torch_support.guard import Suppressed

#: Seconds that ranks wait for each other's vote, while each runs its own step again.
WAIT_S = 120.0
_POLL_S = 0.002


class Ballot:
    """The votes of one rank, and what all came to.

    Args:
        store: The store by which the ranks met (``torch.distributed.Store``).
        key: What all questions are asked under; the same on every rank of the job, and no other job's.
        rank: Of this process.
        ranks: How many there are.
        wait_s: Seconds to wait for the others.
    """

    def __init__(self, store: Any, key: str, rank: int, ranks: int, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._key = key
        self.rank = rank
        self.ranks = ranks
        self._wait_s = wait_s
        self._set("here", rank, "yes")

    def missing(self) -> list[int]:
        """The ranks that do not take part: those that have not made a ballot of this key. Waits for nobody."""
        return [rank for rank in range(self.ranks) if not self._is_set("here", rank)]

    def votes(self, question: str, vote: str) -> list[str] | None:
        """Gives this rank's vote, and waits for those of the others.

        Args:
            question: What it is about; each is asked once.
            vote: Not empty.

        Returns:
            The votes by rank; None where a rank has not given one in time, or the question is `settled` without one.
        """
        self._set(question, self.rank, vote)
        until = time.monotonic() + self._wait_s
        while not (are_given := self._are_given(question)):
            if self._is_set(question.partition("/")[0], "settled") or time.monotonic() > until:
                are_given = self._are_given(question)  # the last may have come, and been decided on, since the look
                break
            time.sleep(_POLL_S)
        return [self._get(question, rank) for rank in range(self.ranks)] if are_given else None

    def settled(self, question: str, proposal: str) -> str:
        """Returns the decision that holds for all ranks: the proposal of the first rank that asked.

        Args:
            question: The part before the ``/`` of what the votes were about.
            proposal: This rank's answer; not empty.
        """
        found = self._store.compare_set(self._name(question, "settled"), "", proposal)
        return _text(found)

    # -- the store ----------------------------------------------------------------------------------------------

    def _are_given(self, question: str) -> bool:
        return all(self._is_set(question, rank) for rank in range(self.ranks))

    def _name(self, question: str, part: object) -> str:
        return f"{self._key}/{question}/{part}"

    def _set(self, question: str, part: object, text: str) -> None:
        self._store.set(self._name(question, part), text)

    def _is_set(self, question: str, part: object) -> bool:
        return bool(self._store.check([self._name(question, part)]))

    def _get(self, question: str, part: object) -> str:
        return _text(self._store.get(self._name(question, part)))


def _text(found: Any) -> str:
    return str(found, "utf-8") if isinstance(found, bytes) else str(found)


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


#: Parts of the names of torch's own communication hooks, and the dtype to which they cast what is sent.
_CASTS = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class GradientReduction(NamedTuple):
    """The reduction of a step's gradients across ranks."""

    by: str  #: what did it, by its name; empty where collectives ran of which it is not known what they sent
    ranks: int
    hook: str = ""  #: the communication hook through which it went
    dtype: torch.dtype | None = None  #: to which the hook casts what is sent; None: not known to cast


def wrapper_of(module: nn.Module) -> nn.Module | None:
    """The ``DistributedDataParallel`` that a module is, or in whose forward it is called now; None outside of any."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if kind is None:
        return None
    outer = getattr(module, "_orig_mod", module)
    is_one = type.__subclasscheck__(kind, type(outer))  # it is an ABC, which asks in Python
    return outer if is_one else getattr(kind, "_active_ddp_module", None)


def synchronising(wrapper: nn.Module | None) -> nn.Module | None:
    """``wrapper`` itself where the backward of a call that is made now reduces gradients; None within ``no_sync``."""
    return wrapper if getattr(wrapper, "require_backward_grad_sync", False) else None


def left_apart(roots: Iterable[nn.Module]) -> tuple[list[str], int] | None:
    """Parameters put into a model after ``DistributedDataParallel`` was built, whose gradients it does not reduce.

    Args:
        roots: The watched models, as the user holds them.

    Returns:
        Their names, and the number of ranks; None where there are none.
    """
    for root in roots:
        wrapper: Any = wrapper_of(root)
        known = getattr(wrapper, "_module_parameters", None)
        if known is None or (ranks := int(wrapper.process_group.size())) == 1:
            continue
        reduced, ignored = set(map(id, known)), getattr(wrapper, "parameters_to_ignore", ())
        trained = [each for each in wrapper.module.named_parameters() if each[1].requires_grad]
        names = [name for name, each in trained if id(each) not in reduced and name not in ignored]
        if names:
            return names, ranks
    return None


def reduction_of_step(wrappers: Iterable[nn.Module], collectives: int | None) -> GradientReduction | None:
    """How the gradients of a step were reduced; None where they were not.

    Args:
        wrappers: What `synchronising` gave for the step's calls.
        collectives: How many collectives ran since the step's first backward began; None: not known.
    """
    for wrapper in wrappers:
        group: Any = wrapper.process_group
        hook = _hook(wrapper)
        if group.size() == 1 and not hook:
            continue
        dtype = next((dtype for part, dtype in _CASTS.items() if part in hook.lower()), None)
        return GradientReduction(type(wrapper).__name__, int(group.size()), hook, dtype)
    joined = rank_of()
    if joined is None or joined[1] == 1 or collectives == 0:
        return None
    return GradientReduction("", joined[1])


def plain_group(wrappers: Iterable[Any]) -> Any | None:
    """The process group of all wrappers, where none has a communication hook; None where they have not one alone."""
    found = list(wrappers)
    groups = {id(wrapper.process_group): wrapper.process_group for wrapper in found}
    return groups.popitem()[1] if len(groups) == 1 and not any(map(_hook, found)) else None


def _hook(wrapper: Any) -> str:
    """The name of the communication hook that was registered; empty without one."""
    with Suppressed():
        own = [hook.__qualname__ for hook, _ in wrapper._comm_hooks]
        return str(own[0] if own else wrapper._get_ddp_logging_data().get("comm_hook", ""))
    return ""
