"""Which modules of a run could compute in a narrower format, and what each would lose there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.numerics.number_format import FORMATS
from ampscope.analysis.overview.ranks.world import sampled_rank, world_of
from ampscope.analysis.precision.plan.code import code_for
from ampscope.analysis.precision.plan.formats import MX, NAMES, SCALED, Fate, block_fate, cast_fate
from ampscope.analysis.precision.plan.members import members
from ampscope.analysis.precision.plan.modules import InFormat, ModulePlan, module_plans
from ampscope.analysis.precision.plan.scales import amax_before
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.analysis.scale.window import OptimizerPart, scale_window
from ampscope.analysis.tables.exponent_rows import NEWEST, Measured, counted, executions, measured_rows
from ampscope.analysis.tables.step_history import histories
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: The loss scale that float16 is judged at in a run that has none: ``GradScaler``'s first, or the largest that fits.
_USUAL_SCALE = 65536.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """An execution that the plan rests on."""

    step: int
    source: str  #: a `Source`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(NotebookRepr):
    """The precision plan of one rank; no modules where no exponents were counted."""

    rank: int = 0
    steps: tuple[MeasuredStep, ...] = ()
    modules: tuple[ModulePlan, ...] = ()  #: in the order in which they ran
    scale_window: tuple[float | None, float | None] = (None, None)  #: loss scales at which gradients fit float16
    optimizers: tuple[OptimizerPart, ...] = ()  #: of the run; empty where it has one
    gradient_scale: float | None = None  #: the loss scale that float16 is judged at
    delayed_share: float | None = None  #: of the tensors, those whose fp8 scale is by steps before; of others their own
    counted_share: float | None = None  #: of the tensors, those whose MX blocks were counted; of others an estimate
    #: By format, the modules that do not fit it.
    stay_up: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By format, what to paste; empty where there is nothing to change.
    code: Mapping[str, str] = field(default_factory=dict)


def plan(run: Run, *, rank: int | None = None) -> Plan:
    """The precision plan of a run, over its newest executions in which exponents were counted.

    Args:
        run: The run.
        rank: Whose; by default the first that was traced.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    rank = sampled_rank(run, world_of(run)) if rank is None else rank
    done = executions(run, rank)
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    measured = measured_rows(run, rank, counted(run, rank, done, NEWEST)[-NEWEST:], sites=sites)
    if not measured.rows:
        return Plan(rank=rank)
    window = scale_window(run, rank)
    scale = _scale(run, rank, window.high)
    amax, known = amax_before(run, rank, measured.rows, done)
    modules = module_plans(measured, members(run, rank, measured, sites), _fates(measured, scale, amax))
    used = dict.fromkeys((row.execution.step, row.execution.source) for row in measured.rows)
    return Plan(
        rank=rank,
        steps=tuple(MeasuredStep(step=step, source=source) for step, source in used),
        modules=modules,
        scale_window=(window.low, window.high),
        optimizers=window.optimizers,
        gradient_scale=scale,
        delayed_share=float(known.mean()),
        counted_share=float(measured.has_blocks.mean()),
        stay_up={name: tuple(m.module for m in modules if m.formats[name].fits is False) for name in NAMES},
        code={name: code_for(name, modules) for name in NAMES},
    )


def only(found: Plan, name: str) -> Plan:
    """The plan for one format."""
    if not found.modules:
        return found
    modules = tuple(replace(each, formats={name: each.formats[name]}) for each in found.modules)
    return replace(found, modules=modules, stay_up={name: found.stay_up[name]}, code={name: found.code[name]})


def _scale(run: Run, rank: int, high: float | None) -> float:
    """The loss scale of the run's next step, at most the largest at which nothing measured overflows.

    Of a run without one, or whose scale is not well, so that it says nothing of the format: what a ``GradScaler`` has.
    """
    for optimizer in histories(run, rank):
        seen = scale_history(run, optimizer=optimizer, rank=rank)
        if seen.health is not None and seen.health.verdict.is_calm and seen.current is not None:
            return min(seen.current, high or math.inf)
    return _USUAL_SCALE if high is None else min(_USUAL_SCALE, high)


def _fates(measured: Measured, scale: float, amax: FloatArray) -> dict[str, InFormat]:
    shown = [place for place, number in enumerate(measured.number) if number is not None]
    rows = [measured.rows[place] for place in shown]
    carried = np.array([row.loss_scale for row in rows], np.float64)
    as_scaled = np.array([scale if row.is_gradient else 1.0 for row in rows], np.float64)
    largest = np.where(np.isnan(amax[shown]), measured.exponents.high, amax[shown])
    numel = np.array([row.numel for row in rows], np.float64)
    found = {}
    for name in NAMES:
        if name in MX:
            both = block_fate(measured.exponents, MX[name], numel)
        else:
            into = FORMATS[name]
            factors = into.largest / largest if name in SCALED else (as_scaled if name == "float16" else 1.0) / carried
            both = cast_fate(measured.exponents, into, factors)
        found[name] = InFormat(*(_spread(fate, shown, len(measured.rows)) for fate in both))
    return found


def _spread(fate: Fate, shown: list[int], rows: int) -> Fate:
    def spread(values: FloatArray) -> FloatArray:
        whole = np.zeros(rows)
        whole[shown] = values
        return whole

    return Fate(*map(spread, fate))
