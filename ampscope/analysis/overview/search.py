"""The search for words in a run: modules, lines, ops and steps, each with where it is to be seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, first_rank
from ampscope.analysis.tables.traced_steps import TracedStep, of_step, traced_steps
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, SiteRow, StepRow, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt; null means not recorded."""

    step: int
    optimizer: int
    loss: float | None
    grad_norm: float | None  #: L2, unscaled, before clipping
    scale: float | None  #: loss scale in use
    next_scale: float | None  #: that of the attempt after it
    growth_tracker: int | None
    skipped: bool
    traced: TracedStep | None  #: the execution with its ops, the real one rather than a replay


def attempt(run: Run, step: int, *, optimizer: int | None = None, rank: int | None = None) -> Attempt | None:
    """The attempt ``step`` of ``optimizer`` (by default the first that made it); None where there was none."""
    rank = first_rank(run) if rank is None else rank
    rows = [row for row in run.rows(Table.STEPS, rank=rank, step=step) if optimizer in (None, row.optimizer)]
    if not rows:
        return None
    row = rows[0]
    after = run.rows(Table.STEPS, rank=rank, step=step + 1, optimizer=row.optimizer)
    return Attempt(
        step=step,
        optimizer=row.optimizer,
        loss=row.loss,
        grad_norm=row.grad_norm,
        scale=row.scale,
        next_scale=after[0].scale if after else None,
        growth_tracker=row.growth_tracker,
        skipped=row.skipped,
        traced=_traced(rank, row),
    )


def _traced(rank: int, row: StepRow) -> TracedStep | None:
    """Returns the traced execution that holds a step's ops, as far as the step itself tells."""
    return TracedStep(rank=rank, step=row.step, source=row.traced, rows=0) if row.traced else None


_NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)
_STEP = re.compile(r"(?:step\s*)?#?(\d[\d,]{0,15})", re.IGNORECASE | re.ASCII)
#: Hits of a kind that are told.
MOST = 6


class HitKind(StrEnum):
    """Names the kinds of hits, in the order in which they are told."""

    STEP = "step"
    MODULE = "module"
    LINE = "line"
    OP = "op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Something that has all the words, and where the first op of it ran in a traced step."""

    kind: HitKind
    text: str  #: the module's name, ``FILE:LINE``, the op, the step's number
    note: str = ""  #: the module's class, the line's code, whether the step was skipped
    step: int | None = None  #: a traced step in which it ran; None where none is kept
    source: str = ""  #: which execution of it: `ampscope.trace.schema.Source`
    seq: int | None = None  #: sequence number of its first op there


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """The hits of one kind, the closest first."""

    kind: HitKind
    total: int  #: how many there are
    hits: tuple[Hit, ...]  #: `MOST` of them at most


#: Of a site: what it is of this kind, what is said beside that, and what else counts where it is searched.
_Told = Callable[[SiteRow], tuple[str, str, str]]
_TOLD: dict[HitKind, _Told] = {
    HitKind.MODULE: lambda site: (site.module, site.module_type, site.op),
    HitKind.LINE: lambda site: (f"{site.file}:{site.line}" if site.file else "", site.code.strip(), ""),
    HitKind.OP: lambda site: (site.op, "", ""),
}


def search(run: Run, text: str, *, rank: int | None = None) -> tuple[Hits, ...]:
    """Returns the modules, lines, ops and steps that have every word of ``text``, whatever the case.

    A module is found also where an op in it has the words. For no words nothing is found.

    Args:
        run: The run.
        text: Words, or the number of a step.
        rank: Whose ops and steps; by default the first's.
    """
    rank = first_rank(run) if rank is None else rank
    words = text.casefold().split()
    if not words:
        return ()
    sites = [site for site in run.rows(Table.SITES, rank=rank) if site.op not in _NODES]
    steps = tuple(_steps(run, text, rank))
    found = [Hits(kind=HitKind.STEP, total=len(steps), hits=steps)]
    for kind, told in _TOLD.items():
        groups = _grouped(sites, told, words)
        closest = sorted(groups, key=lambda name: _distance(name, words))[:MOST]
        firsts = _first_ops(run, rank, {site.site for name in closest for site in groups[name]})
        hits = tuple(_hit(kind, name, groups[name], told(groups[name][0])[1], firsts) for name in closest)
        found.append(Hits(kind=kind, total=len(groups), hits=hits))
    return tuple(each for each in found if each.hits)


def _steps(run: Run, text: str, rank: int) -> Iterator[Hit]:
    asked = _STEP.fullmatch(text.strip())
    made = attempt(run, int(asked[1].replace(",", "")), rank=rank) if asked else None
    if made is not None:
        source = next((one.source for one in traced_steps(run, rank=rank) if one.step == made.step), "")
        note = ", ".join(["skipped"] * made.skipped + ["traced op by op"] * bool(source))
        yield Hit(kind=HitKind.STEP, text=f"{made.step}", note=note, step=made.step, source=source)


def _grouped(sites: Iterable[SiteRow], told: _Told, words: list[str]) -> dict[str, list[SiteRow]]:
    """The sites that have all words, by their name."""
    groups: dict[str, list[SiteRow]] = {}
    for site in sites:
        name, note, also = told(site)
        searched = f"{name} {note} {also}".casefold()
        if name and all(word in searched for word in words):
            groups.setdefault(name, []).append(site)
    return groups


def _distance(name: str, words: list[str]) -> tuple[bool, bool, bool, int, str]:
    """The less, the more a name is what was looked for: itself, beginning with it after its last dot, holding it."""
    low = name.casefold()
    last = re.split(r"[./]", low)[-1]
    begins = any(last.startswith(word) for word in words)
    return low != " ".join(words), not begins, not all(word in low for word in words), len(name), name


def _first_ops(run: Run, rank: int, sites: set[int]) -> dict[int, tuple[int, str, int]]:
    """Returns for each site the step, execution and number of its first op.

    The step is the newest traced one; for sites that did not run there it is the last in which they ran.
    """
    if not sites:
        return {}
    first = nw.col("seq").min().alias("seq")
    found: dict[int, tuple[int, str, int]] = {}
    for newest in traced_steps(run, rank=rank)[:1]:
        there = of_step(run, Table.OPS, newest).filter(nw.col("site").is_in(sorted(sites)))
        found = {
            row["site"]: (newest.step, newest.source, row["seq"]) for row in collect(there.group_by("site").agg(first))
        }
    if left := sorted(sites - found.keys()):
        elsewhere = run.table(Table.OPS, rank=rank).filter(nw.col("site").is_in(left))
        rows = collect(elsewhere.group_by("site", "step", "source").agg(first).sort("step", "source"))
        found.update({row["site"]: (row["step"], row["source"], row["seq"]) for row in rows})
    return found


def _hit(kind: HitKind, name: str, sites: list[SiteRow], note: str, firsts: dict[int, tuple[int, str, int]]) -> Hit:
    places = [firsts[site.site] for site in sites if site.site in firsts]
    newest = max((step for step, *_ in places), default=None)
    step, source, seq = min(
        (place for place in places if place[0] == newest), key=lambda place: place[2], default=(None, "", None)
    )
    return Hit(kind=kind, text=name, note=note, step=step, source=source, seq=seq)
