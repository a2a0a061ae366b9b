"""What there is to say of a run's ranks together, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.overview.ranks.rank_states import Life
from ampscope.analysis.overview.ranks.ranks import Ranks
from ampscope.analysis.overview.ranks.replicas import Apart, Shared
from ampscope.analysis.words.rank_words import ranks_in_words

#: Ranks that lag and are named one by one.
_NAMED = 3
#: Seconds of silence that are told.
_QUIET_S = 60.0


_NO_REPLICAS = "No two ranks have the same gradients after the reduction, so there are no replicas to compare."
_NOT_COMPARED = (
    "Whether ranks are replicas is not known: too few of the first steps had finite gradients on two of them."
)


def ranks_story(seen: Ranks) -> tuple[str, ...]:
    """The ranks in a few sentences; none of a run of one."""
    return tuple(_sentences(seen)) if seen.world.is_shared else ()


def _sentences(seen: Ranks) -> Iterator[str]:
    here = len(seen.world.present)
    yield f"{here:,} of {seen.world.size:,} ranks {'is' if here == 1 else 'are'} in this trace."
    if seen.world.missing:
        yield f"Nothing is there of {ranks_in_words(seen.world.missing)}: not watched, or it never began."
    yield from _first_bad(seen)
    yield from _lag(seen)
    yield from _agreement(seen)


def _first_bad(seen: Ranks) -> Iterator[str]:
    failed = next((each for each in seen.bad if each.origins and each.received), None)
    if failed is not None:
        origins = ranks_in_words([one.rank for one in failed.origins])
        received = ranks_in_words([one.rank for one in failed.received])
        yield f"Step {failed.step:,} is the first whose failure spread: it began on {origins}; {received} received it."


def _lag(seen: Ranks) -> Iterator[str]:
    dead = seen.of_life(Life.DIED)
    if dead:
        yield f"{_upper(ranks_in_words(dead))} ended without being closed."
    for state in seen.lagging[:_NAMED]:
        quiet = state.silent_s or 0.0
        silent = f", and was silent for the last {quiet:,.0f} s" if quiet > _QUIET_S else ""
        yield f"Rank {state.rank:,} stopped at step {state.last_step:,}, {state.behind:,} steps behind{silent}."
    if len(seen.lagging) > _NAMED:
        yield f"{len(seen.lagging) - _NAMED:,} more ranks are behind."


def _agreement(seen: Ranks) -> Iterator[str]:
    groups = seen.replicas.groups
    silent = [each.rank for each in seen.states if each.life is not Life.MISSING and each.last_step is None]
    compared = len(seen.world.present) - len(silent)
    if silent and compared:
        nothing = "; nothing was compared" if compared < 2 else ""
        yield f"{_upper(ranks_in_words(silent))} recorded no step{nothing}."
    if compared < 2:
        return
    if not groups:
        yield _NO_REPLICAS if seen.replicas.compared else _NOT_COMPARED
        return
    apart = {rank for each in seen.replicas.apart for rank in each.ranks}
    sets = f"{len(groups):,} sets of replicas" if len(groups) > 1 else f"{len(groups[0]):,} ranks are replicas"
    if not apart:
        yield f"{sets}: gradient norm, loss scale and skips agree at every step."
    for each in seen.replicas.apart:
        yield _parted(each)


_SHARED = {
    Shared.GRAD_NORM: "gradient norm",
    Shared.SCALE: "loss scale",
    Shared.SKIPPED: "decision to skip",
    Shared.WEIGHTS: "weights",
}


def _parted(apart: Apart) -> str:
    who = _upper(ranks_in_words(apart.ranks))
    what = _SHARED[apart.what]
    if apart.for_good:
        return f"{who} no longer have the same {what} since step {apart.step:,}: they train apart, by design or not."
    others = f"the {len(apart.others):,} others" if apart.others else "one another"
    verb = "differs" if len(apart.ranks) == 1 else "differ"
    times = "steps" if apart.steps > 1 else "step"
    if apart.what is Shared.WEIGHTS:
        held = f"{'holds' if len(apart.ranks) == 1 else 'hold'} other weights than {others}"
        return f"Of the traced steps, {apart.step:,} is the first at which {ranks_in_words(apart.ranks)} {held}."
    return f"{who} {verb} from {others} in the {what} at {apart.steps:,} {times}, first at step {apart.step:,}."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
