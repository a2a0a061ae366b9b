"""Lines of the user's program as HTML: where they break, and what is said of their place."""

from __future__ import annotations

from ampscope.analysis.results import SourceLine
from ampscope.report.html.markup import listing, source_html

LINE = SourceLine(
    file="train.py", line=3, function="train", code="if a < b: loss = F.cross_entropy(model(images[at]), y)"
)


def test_code_breaks_between_its_words_and_stays_what_it_is() -> None:
    drawn = source_html(LINE)
    assert "F.<wbr>cross_entropy(<wbr>model(<wbr>images[<wbr>at]), y)" in drawn
    assert "a &lt; b: loss = F." in drawn.replace("<wbr>", "")


def test_the_place_is_said_once() -> None:
    assert listing([LINE], LINE).count("train.py:3 in train") == 1
    assert "train.py" not in listing([LINE], LINE, placed=False)
