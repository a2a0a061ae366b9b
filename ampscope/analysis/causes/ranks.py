"""Causes that only several ranks together show: those that should agree and do not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import ranks_in_words
from ampscope.numerals import number
from ampscope.trace.vocabulary import Cause

#: Above this share of all steps since the first, ranks do not part now and then: they train apart.
_FOR_GOOD = 0.5


class Shared(StrEnum):
    """Names the quantities that replicas have in common at every step."""

    GRAD_NORM = "grad_norm"
    SCALE = "scale"
    SKIPPED = "skipped"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart(Reason):
    """Ranks that parted from replicas with which they had agreed."""

    what: Shared
    optimizer: int
    step: int  #: the first step at which they differ
    last_step: int
    steps: int  #: how many steps they differ at
    ranks: tuple[int, ...]  #: those that differ from the majority; all of them where there is none
    others: tuple[int, ...]  #: those that went on agreeing; empty where there is no majority
    value: float  #: on the first of `ranks` at `step`; 1 for a skip
    expected: float  #: on the `others`; without a majority, on the last of `ranks`
    parameter: str = ""  #: for `Shared.WEIGHTS`: the first that differs; value and expected are of its extremes
    agreed_at: int | None = None  #: for `Shared.WEIGHTS`: the last step before that was looked at; they agreed there

    @property
    def is_split(self) -> bool:
        """Whether nobody can be said to be right."""
        return not self.others

    @property
    def for_good(self) -> bool:
        """Whether the ranks all went their own ways from some step on, as in training that synchronises seldom."""
        every = self.last_step - self.step + 1
        return self.is_split and self.what is Shared.GRAD_NORM and self.steps > max(1.0, _FOR_GOOD * every)

    def explanation(self, _: Occurrence, /) -> str:
        """States since when which ranks have something else than the others."""
        if self.what is Shared.SKIPPED:
            return _skipped(self)
        if self.what is Shared.WEIGHTS:
            return _weights(self)
        what = "loss scale" if self.what is Shared.SCALE else "gradient norm, to the last bit,"
        times = f"at {self.steps:,} steps since" if self.steps > 1 else "at that step"
        value, expected, who = number(self.value), number(self.expected), ranks_in_words(self.ranks)
        if self.is_split:
            return (
                f"Until step {self.step:,} {who} had the same {what} and {times} they had not ({value} and {expected})."
                " They train the same weights, so one of them computes something else; it cannot be told which."
            )
        return (
            f"Until step {self.step:,} {who} had the same {what} as the {len(self.others):,} that train the same "
            f"weights, and {times} another one ({value} instead of {expected}). {_WHY[self.what]}"
        )


_WHY = {
    Shared.GRAD_NORM: "The reduction gives all of them the same gradients: after it something changed them there.",
    Shared.SCALE: "Each rank decides by itself whether to skip, and they have decided differently.",
}


def _weights(seen: Apart) -> str:
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


def _skipped(seen: Apart) -> str:
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


def _what_to_do(occurrence: Occurrence) -> tuple[Remedy, ...]:
    seen = occurrence.reason
    before = ""
    if isinstance(seen, Apart):
        agreed = seen.agreed_at
        before = f" from step {agreed:,} or before" if agreed is not None else f" from before step {seen.step:,}"
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
    is_value = isinstance(seen, Apart) and seen.what in (Shared.GRAD_NORM, Shared.WEIGHTS)
    return (device, compare) if is_value else (together, compare)


ENTRIES = (
    CauseEntry(
        cause=Cause.REPLICA_APART,
        noun="ranks that should agree and do not",
        sentence="Ranks that train the same weights did not agree.",
        remedies=_what_to_do,
        recognised_in="analysis.diagnosis.across_ranks",
        cured_by_precision=False,
    ),
)
