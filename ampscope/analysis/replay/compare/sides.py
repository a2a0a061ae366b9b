"""The two that are compared: a run, a step of one, a rank; and which traced steps of both belong together."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, collect_rows, first_rank
from ampscope.analysis.tables.step_history import step_optimizers
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.errors import AmpscopeError, RunNotFound
from ampscope.trace.location import location
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import SINK_NODES, Source, Table, execution_of

#: ``RUN``, ``RUN@STEP``, ``RUN@STEP:RANK`` or ``RUN@:RANK``.
_SPEC = re.compile(r"(?P<path>.+)@(?P<step>\d*)(?::(?P<rank>\d+))?")
#: What can be lined up: not counterfactual replays, nor what ran between two steps.
_COMPARABLE = (str(Source.LIVE), str(Source.REPLAY))
#: Program points that are looked at; a training has some thousands.
_MOST_SITES = 1 << 20
#: Columns in which two executions must agree to be the same; other statistics are taken of some outputs by turns.
_NUMBERS = ("seq", "out", "micro_batch", "numel", "checksum", "min", "max")
#: A step and the optimizer whose it is.
Key = tuple[int, int]
_POINT = ("op", "phase", "in_dtypes", "in_shapes", "out_dtypes", "scalars", "autocast")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Describes a run, step or rank as someone named it."""

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
    path, text = location(named), os.fspath(named)
    found = None if path.exists() else _SPEC.fullmatch(text)
    if found is None:
        return Chosen(path)
    step, rank = found["step"], found["rank"]
    return Chosen(location(found["path"]), int(step) if step else None, int(rank) if rank else None)


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
    """The traced steps of both that belong together, in order of execution; live where both traced it so.

    Raises:
        AmpscopeError: a step was asked for of which there is no trace.
    """
    mine, theirs = _traced(one), _traced(other)
    a, b = _asked(one, other)
    pairs = [((here, number), (there, number)) for here, there, number in _keys(mine, theirs, a, b)]
    if not pairs and a is not None:
        raise AmpscopeError(_no_trace(one, other, a, b))
    found = []
    for here, there in pairs:
        source = _source(mine[here], theirs[there])
        found.append((mine[here][source[0]], theirs[there][source[1]]))
    times = _times(one) if len({number for _, number in mine}) > 1 else {}
    return sorted(found, key=lambda pair: (times.get(_key(pair[0]), math.inf), *_key(pair[0])))


def comparable_steps(traced: Iterable[TracedStep]) -> tuple[int, ...]:
    """The numbers of those traced steps that can be lined up with others, in the order given, each once."""
    return tuple(dict.fromkeys(each.step for each in traced if execution_of(each.source)[0] in _COMPARABLE))


def optimizers(one: Opened, other: Opened) -> tuple[int, ...]:
    """By number, those that made a step in either; of one step those of which there is a trace."""
    a, b = _asked(one, other)
    if a is None:
        return tuple(sorted({*step_optimizers(one.run, one.rank), *step_optimizers(other.run, other.rank)})) or (0,)
    return tuple(
        sorted({number for side, at in ((one, a), (other, b)) for step, number in _traced(side) if step == at})
    )


def optimizer_of(traced: TracedStep) -> int:
    """The number of the optimizer whose step was traced."""
    return int(execution_of(traced.source)[1] or 0)


def signatures(side: Opened) -> dict[tuple[int, str], int]:
    """By step and source a number: the same for executions by the same ops with, to the last bit, the same numbers.

    Names of modules and numbers of sites do not count: they may be others in another program, or process. Nor does what
    leaves the step, gradients among it: it is measured by turns, and an op gave it.
    """
    points = _points(side)
    sources = sorted({each.source for found in _traced(side).values() for each in found.values()})
    ops = side.run.table(Table.OPS, rank=side.rank).filter(nw.col("source").is_in(sources))
    columns = ", ".join(f'"{name}"' for name in _NUMBERS)
    where = f"list_extract({points}, site + 1) IS NOT NULL"
    number = f"bit_xor(hash({columns}, list_extract({points}, site + 1)))"
    found = collect_rows(ops, f"step, source, {number}", "step, source", where=where)
    return {(step, source): number for step, source, number in found}


def _points(side: Opened) -> str:
    """A number for each program point, as a list of the query engine's: hashing its words for each op takes long."""
    sites = [site for site in side.run.rows(Table.SITES, rank=side.rank) if 0 <= site.site < _MOST_SITES]
    numbers = ["NULL"] * (max((site.site for site in sites), default=-1) + 1)
    for site in sites:
        if site.op not in SINK_NODES:
            words = repr([_plainly(getattr(site, name)) for name in _POINT])
            numbers[site.site] = str(int.from_bytes(blake2b(words.encode(), digest_size=7).digest()))
    return f"[{', '.join(numbers)}]::BIGINT[]"


def _plainly(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _traced(side: Opened) -> dict[Key, dict[str, TracedStep]]:
    """Returns the traced executions of each optimizer's steps."""
    found: dict[Key, dict[str, TracedStep]] = {}
    for each in traced_steps(side.run, rank=side.rank):
        execution = execution_of(each.source)[0]
        if execution in _COMPARABLE:
            found.setdefault(_key(each), {})[execution] = each
    return found


def _key(traced: TracedStep) -> Key:
    return traced.step, optimizer_of(traced)


def _asked(one: Opened, other: Opened) -> tuple[int | None, int | None]:
    """The step of each that was asked for; None for the runs."""
    return (one.step, other.step if other.step is not None else one.step) if one.step is not None else (other.step,) * 2


def _keys(mine: Iterable[Key], theirs: Iterable[Key], a: int | None, b: int | None) -> list[tuple[int, int, int]]:
    """Steps of both that belong together, and whose they are."""
    known = set(theirs)
    pairs = [(step, step if a is None else b, number) for step, number in mine if a in (None, step)]
    return [(here, there, number) for here, there, number in pairs if there is not None and (there, number) in known]


def _times(side: Opened) -> dict[Key, float]:
    """When traced steps were made: optimizers count their steps each for itself."""
    rows = side.run.table(Table.STEPS, rank=side.rank).filter(nw.col("traced") != "")
    return {(row["step"], row["optimizer"]): row["time"] for row in collect(rows.select("step", "optimizer", "time"))}


def _source(mine: dict[str, TracedStep], theirs: dict[str, TracedStep]) -> tuple[str, str]:
    """The executions of a step that are compared."""
    both = [source for source in _COMPARABLE if source in mine and source in theirs]
    if both:
        return both[0], both[0]
    return next(iter(mine)), next(iter(theirs))


def _no_trace(one: Opened, other: Opened, here: int | None, there: int | None) -> str:
    missing = next(((side, step) for side, step in ((one, here), (other, there)) if step not in _steps(side)), None)
    side, step = missing or (one, here)
    steps = sorted(_steps(side))
    has = f"traced are {_listed(steps)}" if steps else "it has no traced step: record it with watch(..., every=1)"
    return f"{side.run.path} has no trace of step {step} on rank {side.rank}; {has}."


def _steps(side: Opened) -> set[int]:
    return {step for step, _ in _traced(side)}


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(f"{each:,}" for each in numbers[:6])
    return f"{shown} and {len(numbers) - 6:,} more" if len(numbers) > 6 else shown
