"""What ran in which dtype: a bar for the step and for each module, its parts the shares of the ops."""

from __future__ import annotations

from ampscope.analysis.precision.precision import Precision, PrecisionRow, deepest, fold_modules
from ampscope.report import numbers
from ampscope.report.html.markup import as_html
from ampscope.report.html.palette import dtype_color, ink_on
from ampscope.report.html.phrases import share

#: Bars up to which modules are told apart.
_BARS = 16
_ORDER = ("float16", "bfloat16", "float32", "float64")
#: Shares below this have no room for a label.
_LABELLED = 0.12


def precision_html(seen: Precision) -> str:
    """The bars under a sentence; empty where no step was traced."""
    if seen.step is None or not seen.modules:
        return ""
    folded = fold_modules(seen.modules, deepest(seen.modules, _BARS))
    rows = [_row("the whole step", seen.total), *(_row(_module(row), row) for row in folded[:_BARS])]
    more = numbers.count(len(folded) - _BARS, "more module") if len(folded) > _BARS else ""
    told = f"Step {seen.step:,}. {_autocast(seen)}"
    return (
        f'<p>{as_html(told)}</p><div class="amp-shares">{"".join(rows)}</div>'
        f'<div class="amp-place">{more} share of the ops</div>'
    )


def _autocast(seen: Precision) -> str:
    regions = " and ".join(seen.autocast)
    return f"Autocast was on, in {regions}." if regions else "Autocast was off."


def _module(row: PrecisionRow) -> str:
    return row.name or "outside modules"


def _row(name: str, row: PrecisionRow) -> str:
    shares = sorted(row.shares, key=lambda one: (_ORDER.index(one.dtype) if one.dtype in _ORDER else 9, one.dtype))
    parts = "".join(_part(one.dtype, row.part(one.dtype)) for one in shares)
    return f'<span class="amp-share-name">{as_html(name, 34)}</span><div class="amp-share">{parts}</div>'


def _part(dtype: str, part: float) -> str:
    told = as_html(f"{dtype} {share(part)}", 40)
    style = f"width:{100 * part:.2f}%;background:{dtype_color(dtype)};color:{ink_on(dtype)}"
    return f'<span style="{style}" title="{told}">{told if part >= _LABELLED else ""}</span>'
