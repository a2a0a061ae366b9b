"""A plan says which modules of a run could compute in a narrower format, at which scales, and is code to paste.

Delayed scaling takes a tensor's scale from the steps before. A trace has some of these, the recipe has had them all. So
to those that were recorded comes the step just before, taken to lie on the way, even in factors, from the newest of
them to what was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, joined
from ampscope.analysis.overview.bad_steps import sampled_rank, world_of
from ampscope.analysis.precision.plan_modules import (
    MX,
    NAMES,
    SCALED,
    Fate,
    InFormat,
    ModulePlan,
    block_fate,
    cast_fate,
    members,
    module_plans,
)
from ampscope.analysis.rounding import FORMATS
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.analysis.scale.window import OptimizerPart, scale_window
from ampscope.analysis.tables.exponent_rows import (
    NEWEST,
    CountedExecution,
    Measured,
    MeasuredRow,
    counted,
    executions,
    measured_rows,
)
from ampscope.analysis.tables.lazy_tables import collect_columns
from ampscope.analysis.tables.step_history import histories
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Table

_TORCHAO = """\
from torchao.float8 import convert_to_float8_training

LOWER = {{
{names}
}}


def is_lower(module, name):
    return name in LOWER and module.in_features % 16 == 0 and module.out_features % 16 == 0


convert_to_float8_training(model, module_filter_fn=is_lower)"""
_TF32 = "torch.backends.cuda.matmul.allow_tf32 = True\ntorch.backends.cudnn.allow_tf32 = True"


def code_for(name: str, modules: Sequence[ModulePlan]) -> str:
    """Returns code that makes a run compute in a format where modules fit it; empty where none was measured, or does.

    Modules that were not measured are left as they are: torchao converts those alone that are known to fit, and
    `keep_fp32` gets those that are known not to.

    Args:
        name: The format.
        modules: What is known of each.
    """
    judged = [(each.module, each.module_type, each.formats[name].fits) for each in modules]
    low = [module for module, _, fits in judged if fits]
    high = [module for module, _, fits in judged if fits is False and module]
    if name in SCALED or name in MX:
        linear = [module for module, kind, fits in judged if fits and kind == "Linear"]
        return _TORCHAO.format(names=_listed(linear)) if linear and name == SCALED[0] else ""
    if name == "tf32":
        return _TF32 if low and not high else ""
    return f"ampscope.keep_fp32(model, [\n{_listed(high)}\n])" if high else ""


def _listed(names: Collection[str]) -> str:
    return "\n".join(f"    {_quoted(name)}," for name in names)


def _quoted(name: str) -> str:
    text = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


#: Recorded steps whose largest magnitudes are remembered. Recipes remember 16 to 1024 steps, of which a trace has some.
HISTORY = 16
#: Recorded steps that are looked through for them, of what is measured by turns: gradients, and the like.
_BY_TURNS = 256
_NODES = frozenset(Node)


def amax_before(
    run: Run, rank: int, rows: Sequence[MeasuredRow], done: Sequence[CountedExecution]
) -> tuple[FloatArray, BoolArray]:
    """Returns the largest magnitude of each row's place in the recorded steps before, and whether there is any.

    Where there is none, the row's own has to do, as in the first step of a training. Gradients are compared without the
    loss scale, which may have changed.

    Args:
        run: The run.
        rank: One of its ranks.
        rows: What was measured.
        done: The executions whose extremes tell of the steps before.
    """
    by_place = _largest(run, rank, rows, done)
    found, known = np.full(len(rows), np.nan), np.zeros(len(rows), np.bool_)
    for number, row in enumerate(rows):
        steps, sizes = by_place.get((row.site.site, row.out), ([], []))
        end = bisect_left(steps, row.execution.step)
        recorded = sizes[max(0, end - HISTORY) : end]
        if recorded and recorded[-1] > 0:
            found[number] = max(*recorded, _step_before(row, steps[end - 1], recorded[-1])) * row.loss_scale
            known[number] = True
    return found, known


def _step_before(row: MeasuredRow, step: int, size: float) -> float:
    """The largest magnitude in the step before a row's, if it went evenly from what it was in an earlier ``step``."""
    now, way = row.largest / row.loss_scale, 1.0 / (row.execution.step - step)
    return float(size**way * now ** (1.0 - way))


def _largest(
    run: Run, rank: int, rows: Sequence[MeasuredRow], done: Sequence[CountedExecution]
) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """By place, the steps in which it was measured, ascending, and its largest finite magnitude in each."""
    sites = {row.site.site: row for row in rows}
    scales = {(each.step, each.source): each.scale for each in done}
    nodes = {number for number, row in sites.items() if row.site.op in _NODES}
    pieces = []
    for asked, reach in ((sites.keys() - nodes, HISTORY), (nodes, _BY_TURNS)):
        steps = _steps_before({row.execution for row in rows if row.site.site in asked}, done, reach)
        if asked and steps:
            pieces.append(_extremes(run, rank, asked, steps))
    if not pieces:
        return {}
    seen = joined(pieces)
    executed = zip(seen.ints("step").tolist(), seen.arrays["source"].tolist(), strict=True)
    scale = np.array([scales.get(each, np.nan) for each in executed])
    is_gradient = np.isin(seen.ints("site"), [number for number, row in sites.items() if row.is_gradient])
    sizes = seen.floats("size") / np.where(is_gradient, scale, 1.0)
    return _by_place(seen.where(~np.isnan(scale)), sizes[~np.isnan(scale)])


def _by_place(seen: Columns, sizes: FloatArray) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """The steps of each site and output, ascending, and the largest of their sizes in each."""
    if not len(seen):
        return {}
    keys = np.stack([seen.ints("site"), seen.ints("out"), seen.ints("step")])
    order = np.lexsort(keys[::-1])
    keys, sizes = keys[:, order], sizes[order]
    begins = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0)))
    tops, steps = np.maximum.reduceat(sizes, begins).tolist(), keys[2, begins].tolist()
    places = keys[:2, begins]
    firsts = np.flatnonzero(np.append(True, (np.diff(places) != 0).any(axis=0))).tolist()
    named = map(tuple, places[:, firsts].T.tolist())
    ends = [*firsts[1:], len(steps)]
    return {
        (site, out): (steps[begin:end], tops[begin:end])
        for (site, out), begin, end in zip(named, firsts, ends, strict=True)
    }


def _steps_before(measured: Iterable[CountedExecution], done: Sequence[CountedExecution], reach: int) -> set[int]:
    """The recorded steps of the same optimizer, at most ``reach``, before each of those that were measured."""
    by_optimizer: Mapping[int, list[int]] = defaultdict(list)
    for each in done:
        by_optimizer[each.optimizer].append(each.step)
    steps = {number: sorted(set(own)) for number, own in by_optimizer.items()}
    found = set[int]()
    for each in measured:
        own = steps[each.optimizer]
        end = bisect_left(own, each.step)
        found.update(own[max(0, end - reach) : end])
    return found


def _extremes(run: Run, rank: int, sites: Iterable[int], steps: Collection[int]) -> Columns:
    """Step, source, site, output and its largest magnitude, where all of it was finite."""
    size = 'max(greatest(abs("min"), abs("max")))'
    keys = "step, source, site, out"
    where = f'site IN ({", ".join(map(str, sites))}) AND isfinite("min") AND isfinite("max")'
    return collect_columns(run.table(Table.OPS, step=steps, rank=rank), f"{keys}, {size} AS size", keys, where=where)


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
