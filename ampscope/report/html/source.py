"""Lines of the user's program: where they stand, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.results import SourceLine
from ampscope.report.html.markup import as_code, as_html
from ampscope.report.safe_text import short


def source_html(source: SourceLine | None, *, hit: bool = False) -> str:
    """One line with where it stands."""
    if source is None:
        return '<span class="amp-place">No line of yours is known for it.</span>'
    code = f'<div class="amp-code{" hit" if hit else ""}">{as_html(source.code.strip())}</div>' if source.code else ""
    return f'<span class="amp-place">{_where(source)}</span>{code}'


def listing(lines: Sequence[SourceLine], source: SourceLine, *, calm: bool = False) -> str:
    """Lines of one function by number, ``source`` highlighted; what the trace does not hold is an ellipsis."""
    drawn = "".join(_numbered(lines, source.line))
    kind = "amp-listing calm" if calm else "amp-listing"
    return f'<span class="amp-place">{_where(source)}</span><div class="{kind}">{drawn}</div>'


def _where(source: SourceLine) -> str:
    function = f" in {source.function}" if source.function else ""
    return as_html(f"{short(source.file, 120)}:{source.line}{short(function, 80)}", 240)


def _numbered(lines: Sequence[SourceLine], hit: int) -> Iterator[str]:
    before = None
    for each in lines:
        if before is not None and each.line > before + 1:
            yield '<span class="amp-number"></span><span class="amp-gap">&#8943;</span>'
        kind = ' class="hit"' if each.line == hit else ""
        yield f'<span class="amp-number">{each.line}</span><code{kind}>{as_code(each.code.rstrip(), 400)}</code>'
        before = each.line
