"""A run at a glance: its extent, its time line thinned to a screen, what watching it cost, what healing has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import Columns, Curve, FloatArray, IntArray, make_curve, thin_marks
from ampscope.analysis.results import Finding, Incident, MadeCure
from ampscope.analysis.scale.scale_history import scale_after
from ampscope.analysis.scale.scaler_course import changes_since
from ampscope.analysis.tables.lazy_tables import collect, collect_rows, first_rank
from ampscope.analysis.tables.step_history import (
    History,
    in_order,
    log2_curve,
    measured,
    step_optimizers,
    steps_of,
    with_group,
)
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import CureKind, EventKind, ScalerAction, ScalerEventRow, Table, said
from ampscope.trace.schema.tables import details
from ampscope.trace.vocabulary import Severity

#: What a look after a step has found is mended before the next one.
_AFTER = CureKind.STATE


def cures_made(run: Run, rank: int) -> tuple[MadeCure, ...]:
    """The changes that healing has made on a rank, in order."""
    lifted: dict[tuple[int, str], tuple[int, str]] = {}
    for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.CURE_LIFTED):
        detail = details(row.text)
        key = _number(detail.get("cure")), str(detail.get("kind", ""))
        lifted.setdefault(key, (row.step, str(detail.get("text", ""))))
    made = []
    for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.CURE):
        detail = details(row.text)
        kind = said(CureKind, str(detail.get("kind", "")), CureKind.MODULES_FP32)
        lifted_at, because = lifted.get((row.step, kind), (None, ""))
        made.append(
            MadeCure(
                step=row.step,
                kind=kind,
                modules=tuple(map(str, detail.get("modules", ()))),
                code=str(detail.get("code", "")),
                lifted_at=lifted_at,
                lifted_because=because,
                lost=str(detail.get("lost", "")),
                at_once=bool(detail.get("at_once")),
                text=str(detail.get("text", "")),
                applied=bool(detail.get("applied")),
                optimizer=_number(detail.get("optimizer")),
            )
        )
    return tuple(sorted(made, key=lambda each: each.step))


def since_then(
    run: Run,
    rank: int,
    primary: Incident | Finding | None,
    *,
    incidents: Sequence[Incident],
    cures: Sequence[MadeCure],
    history: Mapping[int, History],
) -> str:
    """Whether what is told first has come back since the run was resumed, or it was healed; empty where neither was.

    Args:
        run: The run.
        rank: Whose steps are counted.
        primary: What is told first.
        incidents: Everything that went wrong.
        cures: What healing has changed.
        history: The steps, by optimizer.
    """
    if not isinstance(primary, Incident) or primary.cause.is_ahead:
        return ""
    resumes = [row.step for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.RESUME) if row.step > primary.step]
    of_others = [each for each in incidents if each is not primary]
    healed = [
        each.step
        for each in cures
        if primary.step <= each.step <= primary.last_step + (each.kind == _AFTER)
        and (_is_of(primary, each.step) or not any(_is_of(other, each.step) for other in of_others))
    ]
    if resumes:
        at, what = max(resumes), f"The run was resumed at step {max(resumes):,}"
        back = primary.last_step >= at
    elif healed:
        at, what = healed[0] + 1, f"Healing changed the training at step {healed[0]:,}"
        back = primary.last_step >= at
    else:
        return ""
    if back:
        return f"{what}, and the failure has come back since: at step {primary.last_step:,}."
    steps = sum(each.step.size for each in history.values())
    later = sum(int((each.step >= at).sum()) for each in history.values())
    made = "step" if later == 1 else f"{later:,} steps"
    share = f", {100 * later / steps:.0f} % of the run" if steps else ""
    others = (each.step for each in incidents if each is not primary and each.severity is Severity.ERROR)
    other = next((step for step in sorted(others) if step >= at), None)
    also = f"; another failure came at step {other:,}" if other is not None else ""
    return f"{what}, and the failure has not come back in the {made} since{share}{also}." if later else ""


def _is_of(incident: Incident, step: int) -> bool:
    """Whether a step is known to be one of an incident's."""
    is_each = incident.count == incident.last_step - incident.step + 1
    return step in (incident.step, incident.last_step) or (is_each and incident.step < step < incident.last_step)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else -1


#: Steps whose rates are read, evenly spaced, and groups that are told.
_MOST_STEPS, _MOST_GROUPS = 20_000, 3
#: How far apart, as a share, the ratios of two rates lie at least where they do not move together.
_APART = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """A further parameter group's learning rate."""

    group: str  #: its own name, or its number, from 0
    lr: Curve


def group_curves(run: Run, rank: int, optimizer: int, steps: IntArray, first: FloatArray) -> tuple[GroupCurve, ...]:
    """The rates that are not that of the first group, times a number that is always the same.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: One of its optimizers.
        steps: Its steps, in order.
        first: The first group's rate in each; NaN where it was not recorded.
    """
    rows = steps_of(run, rank, optimizer).filter(~nw.col("lrs").is_null())
    ((count,),) = collect_rows(rows, "count(*)")
    if not count:
        return ()
    every = -(-count // _MOST_STEPS)
    kept = steps % every == 0
    steps, first = steps[kept], first[kept]
    chosen = rows.filter(nw.col("step") % every == 0).select("step", "lrs")
    places = {step: place for place, step in enumerate(steps.tolist())}  # a run may have grown since
    told = {places[row["step"]]: details(row["lrs"]) for row in collect(chosen) if row["step"] in places}
    names = dict.fromkeys(name for rates in told.values() for name in rates if name.partition(" ")[0] != "0")
    found = []
    for name in names:
        rates = with_group(first, told, name)
        if _moves_otherwise(first, rates):
            number, _, own = name.partition(" ")
            known = ~np.isnan(rates)
            found.append(GroupCurve(group=own or number, lr=make_curve(steps[known], rates[known])))
    return tuple(found[:_MOST_GROUPS])


def _moves_otherwise(first: FloatArray, rates: FloatArray) -> bool:
    known = np.isfinite(first) & np.isfinite(rates)
    one, other = first[known], rates[known]
    apart = np.abs(other * one[:1] - other[:1] * one)
    return bool((apart > _APART * np.maximum(np.abs(other * one[:1]), np.abs(other[:1] * one))).any())


_COLUMNS = ("step", "time", "loss", "scale", "grad_norm", "lr", "skipped", "duration_s", "observing_s", "averaged")

_TOLD = (EventKind.RESUME, EventKind.NOTE, EventKind.WARNING, EventKind.UNSEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """Something that happened once, at a step."""

    step: int
    kind: str  #: a `ScalerAction` or an `EventKind`
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview(NotebookRepr):
    """One optimizer's steps at a glance. Shares lie between 0 and 1; null means not recorded.

    It has many attributes because each is one figure or number of the overview.
    """

    rank: int = 0
    optimizer: int = 0
    optimizers: tuple[int, ...] = ()
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    last_time: float | None = None  #: unix time of the newest row, seconds
    skipped: int = 0
    traced: int = 0  #: steps whose ops were recorded
    thinned: int = 0  #: old steps that the disk budget has left without loss, gradient norm and learning rate
    scale: float | None = None  #: loss scale that the next step will use
    step_seconds: float | None = None  #: mean duration of a step
    observing_share: float | None = None  #: AMPscope's own time, as a share of all steps' time
    settled_share: float | None = None  #: the same of the newest half of the steps: the first ones are observed more
    loss: Curve = field(default_factory=Curve)
    grad_norm: Curve = field(default_factory=Curve)
    log2_scale: Curve = field(default_factory=Curve)  #: a scale of 0 counts as not finite
    lr: Curve = field(default_factory=Curve)  #: learning rate of the first parameter group
    group_lrs: tuple[GroupCurve, ...] = ()  #: those of further ones that move otherwise
    skips: tuple[int, ...] = ()  #: thinned; `skipped` is the true number
    moments: tuple[Milestone, ...] = ()  #: saves, loads, resumes and notes, in order

    @property
    def skipped_share(self) -> float | None:
        """Skipped attempts as a share of all attempts."""
        return self.skipped / self.steps if self.steps else None


def overview(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> Overview:
    """The glance at ``optimizer`` and ``rank`` (by default the run's first); an empty run gives an empty one."""
    rank = first_rank(run) if rank is None else rank
    optimizers = step_optimizers(run, rank)
    if not optimizers:
        return Overview(rank=rank, moments=_moments(run, rank))
    chosen = optimizers[0] if optimizer is None else optimizer
    steps = steps_of(run, rank, chosen).select(*_COLUMNS, was_traced=nw.col("traced") != "")
    rows = in_order(steps)
    seen = _from_steps(rows)
    changed = scale_after(changes_since(run, chosen, rank, seen.last_step or 0), seen.last_step or 0)
    return replace(
        seen,
        scale=seen.scale if changed is None else changed,
        optimizer=chosen,
        optimizers=optimizers,
        rank=rank,
        moments=_moments(run, rank),
        group_lrs=group_curves(run, rank, chosen, rows.ints("step"), rows.floats("lr")),
    )


def _from_steps(steps: Columns) -> Overview:
    numbers = steps.ints("step")
    skips = numbers[steps.flags("skipped")]
    scales = measured(steps, "scale")[1]
    return Overview(
        steps=len(steps),
        first_step=int(numbers[0]) if len(steps) else None,
        last_step=int(numbers[-1]) if len(steps) else None,
        last_time=float(steps.floats("time").max()) if len(steps) else None,
        skipped=len(skips),
        traced=int(steps.flags("was_traced").sum()),
        thinned=int(steps.known("averaged").sum()),
        scale=float(scales[-1]) if len(scales) else None,
        step_seconds=float(steps.floats("duration_s").mean()) if len(steps) else None,
        observing_share=_observing_share(steps),
        settled_share=_observing_share(steps, len(steps) // 2),
        loss=make_curve(*measured(steps, "loss")),
        grad_norm=make_curve(*measured(steps, "grad_norm")),
        log2_scale=log2_curve(steps),
        lr=make_curve(*measured(steps, "lr")),
        skips=thin_marks(skips),
    )


def _observing_share(steps: Columns, first: int = 0) -> float | None:
    total = float(steps.floats("duration_s")[first:].sum())
    return float(steps.floats("observing_s")[first:].sum()) / total if total > 0 else None


def _moments(run: Run, rank: int) -> tuple[Milestone, ...]:
    """Saves and loads of scaler state, resumes, notes and warnings, in order."""
    states = (ScalerAction.STATE_SAVED, ScalerAction.STATE_LOADED)
    found = [_state_moment(row) for action in states for row in run.rows(Table.SCALER_EVENTS, rank=rank, action=action)]
    for kind in _TOLD:
        rows = run.rows(Table.EVENTS, rank=rank, kind=kind)
        found += [Milestone(step=row.step, kind=kind, text=row.text) for row in rows]
    for cure in cures_made(run, rank):
        found.append(Milestone(step=cure.step, kind=EventKind.CURE, text=cure.text))
        if cure.lifted_at is not None:
            found.append(Milestone(step=cure.lifted_at, kind=EventKind.CURE_LIFTED, text=cure.text))
    return tuple(sorted(found, key=lambda moment: moment.step))


def _state_moment(row: ScalerEventRow) -> Milestone:
    return Milestone(step=row.step, kind=row.action, text=f"{row.file}:{row.line}" if row.file else "")
