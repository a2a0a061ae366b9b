"""What changed: the runs that began in the newest week against those of the week before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ampscope.analysis.diagnosis.fleet.results import Change, RunVerdict, Window
from ampscope.trace.manifest import Manifest
from ampscope.trace.vocabulary import Verdict

_DAY = 86_400.0


def window(
    manifests: Mapping[Path, Manifest],
    verdicts: Mapping[Path, RunVerdict],
    days: float,
    groups: Mapping[str, Callable[[Manifest], str]],
) -> Window | None:
    """Compares the newest days with as many before; None where no run says when it began.

    Args:
        manifests: Of each run.
        verdicts: Of those that were diagnosed.
        days: How many.
        groups: By its kind, what runs are told apart by.
    """
    begun = {run: each.created for run, each in manifests.items() if each.created > 0}
    if not begun:
        return None
    ends = max(begun.values())
    now = [run for run, time in begun.items() if time > ends - days * _DAY]
    before = [run for run, time in begun.items() if ends - 2 * days * _DAY < time <= ends - days * _DAY]
    hits = [_causes(runs, verdicts) for runs in (before, now)]
    found = [
        _change("cause", name, (len(before), hits[0][name]), (len(now), hits[1][name])) for name in {*hits[0], *hits[1]}
    ]
    for kind, name_of in groups.items():
        sides = [_problems(runs, manifests, verdicts, name_of) for runs in (before, now)]
        found += [_change(kind, name, *(side.get(name, (0, 0)) for side in sides)) for name in {*sides[0], *sides[1]}]
    told = [each for each in found if each.deviations]
    told.sort(key=lambda each: (-abs(each.deviations), each.kind, each.name))
    return Window(days=days, ends=ends, runs=len(now), runs_before=len(before), changes=tuple(told))


def _causes(runs: Iterable[Path], verdicts: Mapping[Path, RunVerdict]) -> Counter[str]:
    """In how many of the runs each cause was told."""
    told = (verdicts[run].told for run in runs if run in verdicts)
    return Counter(cause for each in told for cause in {one.cause.value for one in each})


def _problems(
    runs: Iterable[Path],
    manifests: Mapping[Path, Manifest],
    verdicts: Mapping[Path, RunVerdict],
    name_of: Callable[[Manifest], str],
) -> dict[str, tuple[int, int]]:
    """By name, how many runs there are and how many of them have a problem."""
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        count, bad = found.get(name := name_of(manifests[run]), (0, 0))
        has_problem = run in verdicts and verdicts[run].verdict == Verdict.PROBLEM
        found[name] = count + 1, bad + has_problem
    return found


def _change(kind: str, name: str, before: tuple[int, int], now: tuple[int, int]) -> Change:
    return Change(
        kind=kind,
        name=name,
        runs_before=before[0],
        hit_before=before[1],
        runs=now[0],
        hit=now[1],
        deviations=_deviations(before, now),
    )


def _deviations(before: tuple[int, int], now: tuple[int, int]) -> float:
    """The difference of two shares by its standard error, if both were one share: the pooled two-proportion z-test."""
    (was, hit_before), (runs, hit) = before, now
    if not was or not runs:
        return 0.0
    pooled = (hit_before + hit) / (was + runs)
    error = math.sqrt(pooled * (1 - pooled) * (1 / was + 1 / runs))
    return (hit / runs - hit_before / was) / error if error else 0.0
