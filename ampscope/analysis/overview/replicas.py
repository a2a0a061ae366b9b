"""Do ranks that train the same weights agree? What replicas share is compared; activations and losses differ by data.

After the reduction replicas have the same gradients, so their norm is the same on each, and so are the loss scale and
the decision to skip. Which ranks are replicas is not asked but seen: those whose gradient norms were equal to the last
bit from the first step on. Ranks that hold different parts of a model never agree, and are not compared. Weights are
compared at the steps that several ranks traced.

A trace holds the smallest and the largest element of each parameter as a traced step found it, and nothing finer: what
changes none of the two is not seen.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from ampscope.analysis.causes.ranks import Apart, Shared
from ampscope.analysis.overview.bad_steps import steps_by_rank
from ampscope.analysis.tables.lazy_tables import collect, collect_rows, remembered
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Table

#: Steps that are compared, the first and the last among them, and ranks, evenly chosen.
MOST_STEPS, MOST_RANKS = 3, 128
Extremes = tuple[float | None, float | None]


def traced_together(run: Run, group: Sequence[int]) -> list[int]:
    """The steps that more than one rank of ``group`` traced, in order."""
    members = "" if len(group) == len(run.ranks) else f" AND rank IN ({', '.join(map(str, group))})"
    where = f"traced <> ''{members}"
    rows = collect_rows(run.table(Table.STEPS), "step, count(DISTINCT rank) AS n", "step", where=where, having="n > 1")
    return sorted(step for step, _ in rows)


def spread(steps: Sequence[int]) -> list[int]:
    """The places of some of ``steps``, the first and the last among them."""
    return sorted({place * (len(steps) - 1) // (MOST_STEPS - 1) for place in range(MOST_STEPS)}) if steps else []


def first_differing(run: Run, group: Sequence[int], steps: Sequence[int], parameter: str) -> int:
    """The place in ``steps`` from which on a parameter differs: they agree at the first of them, and not at the last.

    Looks at few of them, by halves: ranks whose weights have parted do not come together again.
    """
    agree, differ = 0, len(steps) - 1
    while differ - agree > 1:
        middle = (agree + differ) // 2
        values = extremes(run, group, steps[middle]).get(parameter)
        if values is None or differing(values) is None:
            agree = middle
        else:
            differ = middle
    return differ


def extremes(run: Run, group: Sequence[int], step: int) -> Mapping[str, Mapping[int, Extremes]]:
    """Returns each parameter's smallest and largest element on each rank of ``group``, as ``step`` found it."""
    chosen = tuple(group[:: math.ceil(len(group) / MOST_RANKS)])
    sites = run.table(Table.SITES, rank=chosen).filter(nw.col("op") == str(Node.PARAMETER))
    ops = run.table(Table.OPS, step=step, rank=chosen).select("rank", "site", "min", "max")
    rows = collect(ops.join(sites.select("rank", "site", "name"), on=["rank", "site"]))
    found: dict[str, dict[int, Extremes]] = defaultdict(dict)
    for row in rows:
        if row["min"] is not None:
            found[row["name"]][row["rank"]] = (row["min"], row["max"])
    return found


def differing(
    values: Mapping[int, Any], differs: Callable[[Any, Any], bool] = lambda one, other: repr(one) != repr(other)
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ranks that differ from the majority, and the majority; all and none without one, None where all agree."""
    usual, count = Counter(map(repr, values.values())).most_common(1)[0]
    expected = next(value for value in values.values() if repr(value) == usual)
    others = tuple(rank for rank, value in sorted(values.items()) if differs(value, expected))
    if not others:
        return None
    if 2 * count <= len(values):
        return tuple(sorted(values)), ()
    return others, tuple(rank for rank in sorted(values) if rank not in set(others))


#: Steps at the beginning that have to agree to the last bit, and how many of them have to be finite, for ranks to be
#: replicas: equal norms of different gradients do not happen by chance so often.
_FIRST, _LEAST = 16, 4
#: A relative difference of norms that the order of a sum may make.
ROUNDING = 1e-5
#: Steps that are looked at rank by rank where replicas disagree: the first, and some of the rest.
_LOOKED_AT, _SAMPLED = 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Says which ranks train the same weights, and which of them have parted."""

    groups: tuple[tuple[int, ...], ...] = ()  #: ranks that agreed from the first step on
    apart: tuple[Apart, ...] = ()  #: the earliest first
    compared: bool = True  #: whether two ranks or more had enough finite gradients to tell replicas by


@remembered(Table.STEPS, Table.OPS)
def replicas(run: Run) -> Replicas:
    """Compares what replicas share, over all steps; of a run of one rank there is nothing to compare."""
    everyone = tuple(sorted(steps_by_rank(run)))  # a rank that recorded nothing agrees with none
    if len(everyone) < 2:
        return Replicas(compared=False)
    groups: tuple[tuple[int, ...], ...] = (everyone,)
    parted = _parted(run, groups)
    if _is_early(parted) or not _tells(_first_norms(run, everyone[0]).get(everyone[0], {})):
        groups = _groups(run)
        parted = _parted(run, groups) if groups else {}
    by_group = (_apart(run, groups[number], optimizer, steps) for (number, optimizer), steps in parted.items())
    found = [each for apart in by_group for each in apart]
    known = {rank for each in found for rank in each.ranks}
    found += [each for group in groups for each in _weights_apart(run, group) if not known.issuperset(each.ranks)]
    apart = tuple(sorted(found, key=lambda each: each.step))
    return Replicas(groups=groups, apart=apart, compared=bool(groups) or _can_be_compared(run))


def _is_early(parted: Mapping[tuple[int, int], Mapping[Shared, list[int]]]) -> bool:
    """Whether ranks differ at the first steps already, so that not all of them are replicas of one another."""
    return any(steps[0] < _FIRST for differing in parted.values() for steps in differing.values())


def _first_norms(run: Run, rank: int | None = None) -> dict[int, dict[tuple[int, int], float]]:
    """The gradient norms of each rank at the first steps, by optimizer and step."""
    where, steps = f"step < {_FIRST} AND grad_norm IS NOT NULL", run.table(Table.STEPS, rank=rank)
    rows = collect_rows(steps, f"rank, optimizer, step, {_NORM}", where=where)
    norms: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for each, optimizer, step, norm in rows:
        norms[each][optimizer, step] = norm
    return norms


def _tells(norms: Mapping[tuple[int, int], float]) -> bool:
    """Whether equal norms mean equal gradients: there are enough of them, and they are not all the same."""
    return len({norm for norm in norms.values() if math.isfinite(norm)}) >= _LEAST


def _can_be_compared(run: Run) -> bool:
    """Whether the first steps of two ranks at least say which gradients they had."""
    return sum(_tells(norms) for norms in _first_norms(run).values()) > 1


def _groups(run: Run) -> tuple[tuple[int, ...], ...]:
    """The ranks whose gradient norms were equal to the last bit at the first steps."""
    norms = _first_norms(run)
    alike: dict[frozenset[Any], list[int]] = defaultdict(list)
    common = set.intersection(*(set(each) for each in norms.values())) if norms else set()
    for rank, each in sorted(norms.items()):
        known = {where: each[where] for where in common}
        if _tells(known):
            alike[frozenset((where, repr(norm)) for where, norm in known.items())].append(rank)
    return tuple(tuple(ranks) for ranks in alike.values() if len(ranks) > 1)


#: Of what the optimizer was given: a loop may reduce gradients across ranks by itself.
_NORM = "coalesce(clipped_grad_norm, grad_norm)"
_FINITE = f"CASE WHEN isfinite({_NORM}) THEN {_NORM} END"
#: In the engine's words, over the ranks of a group at one step.
_DIFFERS = {
    Shared.SKIPPED: "bool_or(skipped) <> bool_and(skipped)",
    Shared.SCALE: "min(scale) <> max(scale)",
    Shared.GRAD_NORM: (
        f"(count({_FINITE}) > 0 AND count({_FINITE}) < count({_NORM})) OR "
        f"max({_FINITE}) - min({_FINITE}) > {ROUNDING} * max({_FINITE})"
    ),
}


def _parted(run: Run, groups: Sequence[Sequence[int]]) -> Mapping[tuple[int, int], Mapping[Shared, list[int]]]:
    """By group and optimizer, the steps at which its ranks differ in each of what they share, in order."""
    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    numbers = ", ".join(str(group_of.get(rank, -1)) for rank in range(max(group_of) + 1))
    member = f"coalesce(([{numbers}])[rank + 1], -1)"
    differing = ", ".join(f"{differs} AS {what}" for what, differs in _DIFFERS.items())
    rows = collect_rows(
        run.table(Table.STEPS),
        f"{member} AS member, optimizer, step, {differing}",
        f"{member}, optimizer, step",
        having=f"member >= 0 AND ({' OR '.join(_DIFFERS)})",
        order="step",
    )
    found: dict[tuple[int, int], dict[Shared, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, optimizer, step, *differs in rows:
        for what, does in zip(_DIFFERS, differs, strict=True):
            if does:
                found[number, optimizer][what].append(step)
    return found


def _apart(run: Run, group: Sequence[int], optimizer: int, parted: Mapping[Shared, list[int]]) -> list[Apart]:
    """Who is apart in a group: a rank once, by what it differed in first."""
    found: list[Apart] = []
    for what, steps in sorted(parted.items(), key=lambda each: (each[1][0], list(_DIFFERS).index(each[0]))):
        known = {rank for each in found for rank in each.ranks}
        found += [each for each in _of_kind(run, group, optimizer, what, steps) if not known.issuperset(each.ranks)]
    return found


def _of_kind(run: Run, group: Sequence[int], optimizer: int, what: Shared, steps: Sequence[int]) -> list[Apart]:
    looked_at = [*steps[:_LOOKED_AT], *steps[_LOOKED_AT :: max(1, len(steps) // _SAMPLED)]]
    where = f"optimizer = {optimizer} AND step IN ({', '.join(map(str, looked_at))})"
    rows = collect_rows(run.table(Table.STEPS), f"step, rank, {what.value}", where=where, order="step, rank")
    members = set(group)
    values: dict[int, dict[int, Any]] = defaultdict(dict)
    for step, rank, value in rows:
        if rank in members and value is not None:
            values[step][rank] = value
    first: dict[int, Apart] = {}
    for step in sorted(values):
        parts = differing(values[step], _norms_differ if what is Shared.GRAD_NORM else operator.ne)
        if parts is None or set(parts[0]) <= first.keys():
            continue
        ranks, others = tuple(rank for rank in parts[0] if rank not in first), parts[1]
        later = [each for each in steps if each >= step]
        told = Apart(
            what=what,
            optimizer=optimizer,
            step=step,
            last_step=later[-1],
            steps=len(later),
            ranks=ranks,
            others=others,
            value=float(values[step][ranks[0]]),
            expected=float(values[step][others[0] if others else ranks[-1]]),
        )
        first.update(dict.fromkeys(ranks, told))
    return list(dict.fromkeys(first.values()))


def _weights_apart(run: Run, group: Sequence[int]) -> list[Apart]:
    """The rank whose weights were the first not to be those of its replicas, at the steps that several traced."""
    steps = traced_together(run, group)
    agreed: dict[str, int] = {}
    for place in spread(steps):
        for parameter, values in extremes(run, group, steps[place]).items():
            parts = differing(values)
            if parts is None:
                agreed[parameter] = place
            elif parts[1] or parameter in agreed:  # else each rank may hold a part of its own
                return [_weight_apart(run, group, steps, (agreed.get(parameter), place), parameter)]
    return []


def _weight_apart(
    run: Run, group: Sequence[int], steps: Sequence[int], between: tuple[int | None, int], parameter: str
) -> Apart:
    """Since when a parameter differs: at the place that is given last, and not at the one before, if there is one."""
    agree, place = between
    if agree is not None:
        place = agree + first_differing(run, group, steps[agree : place + 1], parameter)
    values = extremes(run, group, steps[place])[parameter]
    ranks, others = differing(values) or (tuple(values), ())
    pairs = zip(values[ranks[0]], values[others[0] if others else ranks[-1]], strict=True)
    value, expected = next((pair for pair in pairs if repr(pair[0]) != repr(pair[1])), (None, None))
    return Apart(
        what=Shared.WEIGHTS,
        optimizer=0,
        step=steps[place],
        last_step=steps[-1],
        steps=len(steps) - place,
        ranks=ranks,
        others=others,
        value=float(value or 0.0),
        expected=float(expected or 0.0),
        parameter=parameter,
        agreed_at=steps[place - 1] if agree is not None else None,
    )


def _norms_differ(value: float, expected: float) -> bool:
    if not (math.isfinite(value) and math.isfinite(expected)):
        return math.isfinite(value) != math.isfinite(expected)
    return abs(value - expected) > ROUNDING * max(abs(value), abs(expected))
