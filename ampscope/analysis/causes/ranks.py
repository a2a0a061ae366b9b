"""Causes that only several ranks together show: those that should agree and do not."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import number, ranks_in_words
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted(Reason):
    """Replicas that had agreed, and no longer did."""

    what: str  #: ``grad_norm``, ``scale``, ``skipped`` or ``weights``
    step: int  #: the first at which they differ
    steps: int  #: how many they differ at
    ranks: tuple[int, ...]  #: those apart
    others: tuple[int, ...]  #: those that went on agreeing; empty where nobody can be said to be right
    value: float
    expected: float
    parameter: str = ""  #: the first whose weights differ
    agreed_at: int | None = None  #: the last step before at which weights were looked at, and agreed


def _apart(occurrence: Occurrence) -> str:
    seen = occurrence.reason
    if not isinstance(seen, Parted):
        return "Ranks that train the same weights did not agree."
    if seen.what == "skipped":
        return _skipped(seen)
    if seen.what == "weights":
        return _weights(seen)
    what = "loss scale" if seen.what == "scale" else "gradient norm, to the last bit,"
    times = f"at {seen.steps:,} steps since" if seen.steps > 1 else "at that step"
    values = f"{number(seen.value)} and {number(seen.expected)}"
    if not seen.others:
        return (
            f"Until step {seen.step:,} {ranks_in_words(seen.ranks)} had the same {what} and {times} they had not "
            f"({values}). They train the same weights, so one of them computes something else; it cannot be told which."
        )
    return (
        f"Until step {seen.step:,} {ranks_in_words(seen.ranks)} had the same {what} as the {len(seen.others):,} that "
        f"train the same weights, and {times} another one ({number(seen.value)} instead of {number(seen.expected)}). "
        + _WHY[seen.what]
    )


_WHY = {
    "grad_norm": "The reduction gives all of them the same gradients: after it something changed them there.",
    "scale": "Each rank decides by itself whether to skip, and they have decided differently.",
}


def _weights(seen: Parted) -> str:
    before = f" At step {seen.agreed_at:,} they still were." if seen.agreed_at is not None else ""
    if not seen.others:
        return (
            f"At step {seen.step:,} the parameter {seen.parameter} reached {number(seen.value)} on rank "
            f"{seen.ranks[0]:,} and {number(seen.expected)} on rank {seen.ranks[-1]:,}, which get the same gradients: "
            f"the weights are no longer the same.{before} It cannot be told which of them went wrong, by a fault, or "
            "because they were loaded or changed there alone."
        )
    return (
        f"At step {seen.step:,} the parameter {seen.parameter} reached {number(seen.value)} on "
        f"{ranks_in_words(seen.ranks)} and {number(seen.expected)} on the {len(seen.others):,} others that get the "
        "same gradients: the weights are no longer the same, by a fault of that rank, or because they were loaded or "
        f"changed there alone.{before}"
    )


def _skipped(seen: Parted) -> str:
    did = "skipped the optimizer's step" if seen.value else "did not skip the optimizer's step"
    whose = f"the {len(seen.others):,} others that train the same weights" if seen.others else "the others"
    who = ranks_in_words(seen.ranks[:1] if not seen.others else seen.ranks)
    again = f", and they decided apart at {seen.steps:,} steps in all" if seen.steps > 1 else ""
    return (
        f"At step {seen.step:,} {who} {did} and {whose} decided otherwise{again}. From there on their weights differ."
    )


_COMPARE = """\
sums = torch.stack([p.detach().double().sum() for p in model.parameters()])
gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, sums)
assert all(torch.equal(each, sums) for each in gathered), 'the ranks no longer have the same weights'"""


def _last_good(seen: Parted) -> str:
    return (
        f" from step {seen.agreed_at:,} or before" if seen.agreed_at is not None else f" from before step {seen.step:,}"
    )


def _what_to_do(occurrence: Occurrence) -> tuple[Remedy, ...]:
    seen = occurrence.reason
    before = _last_good(seen) if isinstance(seen, Parted) else ""
    together = Remedy(
        text="Let all ranks decide together whether to skip: exchange what the scaler found before it steps, as "
        "ShardedGradScaler does, and see that the last micro-batch is not under no_sync().",
        untried=cause_entry.RANKS,
    )
    device = Remedy(
        text="Test the device and the memory of the ranks that are apart, or move them to another host; and look for "
        "code that one rank alone runs on its gradients or weights.",
        untried=cause_entry.RANKS,
    )
    compare = Remedy(
        text=f"Compare the weights of all ranks, and go on from a checkpoint{before} where they differ.",
        code=_COMPARE,
        untried=cause_entry.RANKS,
    )
    is_value = isinstance(seen, Parted) and seen.what in ("grad_norm", "weights")
    return (device, compare) if is_value else (together, compare)


ENTRIES = (
    CauseEntry(
        cause=Cause.REPLICA_APART,
        noun="ranks that should agree and do not",
        sentence=_apart,
        remedies=_what_to_do,
        recognised_in="analysis.diagnosis.across_ranks",
        cured_by_precision=False,
    ),
)
