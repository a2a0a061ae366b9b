"""The two that are compared: a run, a step of one, a rank; and which traced steps of both belong together."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect_groups, first_rank, rank_table
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.errors import AmpscopeError, RunNotFound
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import SINK_NODES, Source, Table

#: ``RUN``, ``RUN@STEP``, ``RUN@STEP:RANK`` or ``RUN@:RANK``.
_SPEC = re.compile(r"(?P<path>.+)@(?P<step>\d*)(?::(?P<rank>\d+))?")
#: What can be lined up: not counterfactual replays, nor what ran between two steps.
_COMPARABLE = (str(Source.LIVE), str(Source.REPLAY))
_SINKS = tuple(sorted(str(node) for node in SINK_NODES))
#: Columns in which two executions must agree to be the same; other statistics are taken of some outputs by turns.
_NUMBERS = ("seq", "out", "micro_batch", "numel", "checksum", "min", "max")
_POINT = ("op", "phase", "in_dtypes", "in_shapes", "out_dtypes", "scalars", "autocast")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What someone named."""

    path: Path
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """One of the two, opened."""

    run: Run
    rank: int
    step: int | None


def chosen(named: str | os.PathLike[str]) -> Chosen:
    """Read ``RUN``, ``RUN@STEP``, ``RUN@STEP:RANK`` or ``RUN@:RANK``; a folder that is there is meant as it is."""
    path, text = Path(named), os.fspath(named)
    found = None if path.exists() else _SPEC.fullmatch(text)
    if found is None:
        return Chosen(path)
    step, rank = found["step"], found["rank"]
    return Chosen(Path(found["path"]), int(step) if step else None, int(rank) if rank else None)


def opened(what: Chosen) -> Opened:
    """Open a side.

    Raises:
        RunError: it cannot be read.
        RunNotFound: it has no such rank.
    """
    run = open_run(what.path)
    if what.rank is not None and what.rank not in run.ranks:
        run.close()
        raise RunNotFound(f"{what.path} has nothing of rank {what.rank}; it has {_listed(run.ranks)}.")
    return Opened(run, first_rank(run) if what.rank is None else what.rank, what.step)


def steps_together(one: Opened, other: Opened) -> list[tuple[TracedStep, TracedStep]]:
    """The traced steps of both that belong together, by step; where both traced the step as it ran, these.

    Raises:
        AmpscopeError: a step was asked for of which there is no trace.
    """
    mine, theirs = _traced(one), _traced(other)
    if one.step is not None or other.step is not None:
        a = one.step if one.step is not None else other.step
        b = other.step if other.step is not None else one.step
        pairs = [(a, b)]
    else:
        pairs = [(step, step) for step in mine if step in theirs]
    found = []
    for here, there in pairs:
        if here is None or there is None or not (source := _source(mine.get(here, {}), theirs.get(there, {}))):
            raise AmpscopeError(_no_trace(one, other, here, there))
        found.append((mine[here][source[0]], theirs[there][source[1]]))
    return sorted(found, key=lambda pair: pair[0].step)


def signatures(side: Opened) -> dict[tuple[int, str], int]:
    """By step and source a number: the same for executions by the same ops with, to the last bit, the same numbers.

    Names of modules and numbers of sites do not count: they may be others in another program, or process. Nor does what
    leaves the step, gradients among it: it is measured by turns, and an op gave it.
    """
    sites = rank_table(side.run, Table.SITES, side.rank).filter(~nw.col("op").is_in(_SINKS)).select("site", *_POINT)
    ops = rank_table(side.run, Table.OPS, side.rank).filter(nw.col("source").is_in(_COMPARABLE))
    joined = ops.select("step", "source", "site", *_NUMBERS).join(sites, on="site", how="inner")
    columns = ", ".join(f'"{name}"' for name in (*_NUMBERS, *_POINT))
    found = collect_groups(joined, f"step, source, bit_xor(hash({columns}))", "step, source")
    return {(step, source): number for step, source, number in found}


def _traced(side: Opened) -> dict[int, dict[str, TracedStep]]:
    found: dict[int, dict[str, TracedStep]] = {}
    for each in traced_steps(side.run, rank=side.rank):
        if each.source in _COMPARABLE:
            found.setdefault(each.step, {})[each.source] = each
    return found


def _source(mine: dict[str, TracedStep], theirs: dict[str, TracedStep]) -> tuple[str, str] | None:
    """The executions of a step that are compared."""
    both = [source for source in _COMPARABLE if source in mine and source in theirs]
    if both:
        return both[0], both[0]
    return (next(iter(mine)), next(iter(theirs))) if mine and theirs else None


def _no_trace(one: Opened, other: Opened, here: int | None, there: int | None) -> str:
    missing = next(((side, step) for side, step in ((one, here), (other, there)) if step not in _traced(side)), None)
    side, step = missing or (one, here)
    steps = sorted(_traced(side))
    has = f"traced are {_listed(steps)}" if steps else "it has no traced step: record it with watch(..., every=1)"
    return f"{side.run.path} has no trace of step {step} on rank {side.rank}; {has}."


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(f"{each:,}" for each in numbers[:6])
    return f"{shown} and {len(numbers) - 6:,} more" if len(numbers) > 6 else shown
