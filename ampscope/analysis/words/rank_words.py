"""Ranks in words; of a run of one rank nothing is said."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.results import Finding, Incident

#: Stretches of ranks that are named before the rest is only counted.
_NAMED = 4


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0 to 15 and 17``; of many stretches the first, and how many more."""
    stretches = _stretches(sorted(set(ranks)))
    named = [_stretch(first, last) for first, last in stretches[:_NAMED]]
    left = sum(last - first + 1 for first, last in stretches[_NAMED:])
    named += [f"{left:,} more"] if left else []
    words = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {words}"


def where_ranked(item: Incident | Finding) -> str:
    """``on rank 1 of 2``, ``on ranks 3 and 4 of 8``, ``on all 8 ranks``; empty where there is one."""
    if item.world <= 1:
        return ""
    ranks = (item.rank, *item.also_on)
    if len(ranks) >= item.world:
        return "on both ranks" if item.world == 2 else f"on all {item.world:,} ranks"
    return f"on {ranks_in_words(ranks)} of {item.world:,}"


def first_ranked(item: Incident | Finding) -> str:
    """`where_ranked` without the ranks on which the same came later, which `further_in_words` tells."""
    if item.world <= 1 or 1 + len(item.also_on) >= item.world:
        return where_ranked(item)
    return f"on rank {item.rank:,} of {item.world:,}"


def further_in_words(item: Incident | Finding) -> str:
    """On which other ranks the same failed by itself, as a sentence; empty where it did on none, or on all."""
    if not item.also_on or 1 + len(item.also_on) >= item.world:
        return ""
    return f"The same failed by itself on {ranks_in_words(item.also_on)}."


def received_in_words(incident: Incident) -> str:
    """Who got the value from the rank where it was born, as a sentence; empty where nobody did."""
    got = incident.received_by
    if not got:
        return ""
    if len(got) > 1 and len(got) + 1 + len(incident.also_on) >= incident.world:
        return "Both other ranks received it." if len(got) == 2 else f"All {len(got):,} other ranks received it."
    words = ranks_in_words(got)
    return f"{words[:1].upper()}{words[1:]} received it."


def _stretch(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _stretches(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each stretch without a gap; two neighbours are no stretch."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    pairs = [[(first, first), (last, last)] if last == first + 1 else [(first, last)] for first, last in found]
    return [each for pair in pairs for each in pair]
