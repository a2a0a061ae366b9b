"""A precision plan for the terminal: module by module, what a narrower format would lose, and the plan as code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.precision.plan.formats import MX, NAMES, SCALED
from ampscope.analysis.precision.plan.modules import FormatLoss, ModulePlan
from ampscope.analysis.precision.plan.plan import Plan
from ampscope.analysis.words.scale_words import in_words
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import Fitting, code, heading, indented, prose

#: What a share is of, in the order in which they are told.
_SHARES = {
    "overflow": "overflow_share",
    "flushed to zero": "lost_share",
    "subnormal": "subnormal_share",
    "gradients: overflow": "gradient_overflow_share",
    "gradients: flushed": "gradient_lost_share",
    "gradients: subnormal": "gradient_subnormal_share",
}
_HEADS = {"float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2", "mxfp8_e4m3": "mx e4m3", "mxfp8_e5m2": "mx e5m2"}
#: The first formats to go where the terminal is narrow.
_EXPENDABLE = ("tf32", "mxfp8_e5m2", "mxfp8_e4m3", "float8_e5m2")


def as_text(plan: Plan, name: str | None = None) -> RenderableType:
    """The plan for all formats, or for one in detail."""
    return Group(*_blocks(plan, name))


def _blocks(plan: Plan, name: str | None) -> Iterator[RenderableType]:
    if not plan.modules:
        yield prose(
            "No step of this run has counted exponents, so nothing is known of what a narrower format would lose. "
            "Traced healthy steps count them (ampscope.watch(model, scaler, every=100)), and so do replays of bad ones."
        )
        return
    yield prose(_basis(plan))
    yield Text()
    yield indented(_all(plan.modules) if name is None else _one(plan.modules, name))
    yield Text()
    yield prose(" ".join(each.strip() for each in _notes(plan, name)))
    for each in NAMES if name is None else (name,):
        yield from _advice(plan, each, asked=name is not None)


def _basis(plan: Plan) -> str:
    live = sum(step.source.startswith("live") for step in plan.steps)
    parts = [numbers.count(live, "step") + " as it ran" * (live == 1) + " as they ran" * (live > 1)] if live else []
    replayed = len(plan.steps) - live
    parts += [numbers.count(replayed, "replayed step")] if replayed else []
    return f"By the exponents of {' and '.join(parts)}, up to step {max(step.step for step in plan.steps):,}."


def _all(modules: Sequence[ModulePlan]) -> RenderableType:
    def draw(columns: Sequence[str]) -> Table:
        table = _table()
        for column in columns:
            table.add_column(_HEADS.get(column, column))
        for each in modules:
            table.add_row(_name(each), *(_cell(each, column) for column in columns))
        return table

    return Fitting(draw, NAMES, _EXPENDABLE)


def _one(modules: Sequence[ModulePlan], name: str) -> RenderableType:
    table = _table()
    table.add_column("")
    for head in _SHARES:
        table.add_column(head, justify="right")
    for each in modules:
        loss = each.formats[name]
        shares = (getattr(loss, field) for field in _SHARES.values())
        cells = [numbers.share(part, narrow=True, missing="not measured") for part in shares]
        if loss.lost_at_most and loss.lost_share is not None and loss.lost_at_most > loss.lost_share + 0.001:
            cells[1] += f" (at most {numbers.share(loss.lost_at_most, narrow=True)})"
        table.add_row(_name(each), _verdict(loss), *cells)
    return table


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("module", overflow="fold")
    return table


def _name(each: ModulePlan) -> Text:
    return Text(visible(each.module or "(the model itself)"))


def _verdict(loss: FormatLoss) -> str:
    return {True: "fits", False: "stays up", None: "not measured"}[loss.fits]


def _cell(each: ModulePlan, name: str) -> str:
    loss = each.formats[name]
    if loss.fits is not False:
        return _verdict(loss)
    if each.overflowed and name == "float16":
        return "overflowed"
    head = next(head for head, field in _SHARES.items() if field == loss.why)
    return f"{head} {numbers.share(getattr(loss, loss.why), narrow=True)}"


def _notes(plan: Plan, name: str | None) -> Iterator[str]:
    yield "Shares are of all values, and of the mass of gradients."
    yield "Only range is judged: what rounding to few bits does to a training, no histogram tells."
    shown = NAMES if name is None else (name,)
    if "float16" in shown and plan.gradient_scale is not None:
        low, high = plan.scale_window
        ends = " to ".join("unknown" if end is None else in_words(end) for end in (low, high))
        yield f"float16 is judged at a loss scale of {in_words(plan.gradient_scale)}; gradients fit it from {ends}."
    if any(each in SCALED for each in shown) and plan.delayed_share is not None:
        share = numbers.share(plan.delayed_share)
        yield f"In fp8 each tensor is scaled by its largest value of steps before, where they were recorded ({share});"
        yield "what is larger becomes the largest number."
    if any(each in MX for each in shown):
        yield "What lies too far below the largest of its MX block, 32 elements beside each other in memory, is counted"
        counted = plan.counted_share or 0.0
        tensors = f" of {numbers.share(counted)} of the tensors; of others it is an estimate, for values in no order."
        yield "in sampled steps" + (tensors if counted < 1.0 else ".")
        yield "The largest of a block may overflow by design, and lose an eighth."


def _advice(plan: Plan, name: str, *, asked: bool) -> Iterator[RenderableType]:
    text = plan.code.get(name, "")
    if not text and not asked:
        return
    up = [module or "(the model itself)" for module in plan.stay_up.get(name, ())]
    if not text:
        yield heading(name)
        yield prose(
            f"These should stay above it: {', '.join(up)}." if up else "Every module that was measured fits it."
        )
        return
    yield heading(f"For {name}")
    yield code(text)
