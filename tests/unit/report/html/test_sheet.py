"""The style sheets: every colour comes from the palette, by a name that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ampscope.report.html
from ampscope.report.html.markup import SHEET, style_for, style_of
from ampscope.report.palette import css_variables

SHEETS = sorted(Path(ampscope.report.html.__file__).parent.glob("*.css"))


@pytest.mark.parametrize("file", SHEETS, ids=lambda file: file.name)
def test_colours_have_a_name_of_the_palette(file: Path) -> None:
    sheet = style_of(file.stem)
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|rgba?\(", sheet)
    assert set(re.findall(r"var\((--amp-[\w-]+)\)", sheet)) <= set(re.findall(r"(--amp-[\w-]+):", css_variables()))


def test_the_sheet_is_whole_and_without_comments() -> None:
    assert SHEET.count("{") == SHEET.count("}")
    assert "/*" not in SHEET
    assert ".amp-card" in SHEET
    assert ".amp-stack" in SHEET


def test_a_dark_screen_has_a_light_ink_and_paper_has_none() -> None:
    rules = css_variables()
    assert rules.index(":root { --amp-ink") < rules.index("prefers-color-scheme: dark") < rules.index("@media print")


def test_rules_of_classes_that_do_not_occur_are_left_out() -> None:
    style = "p{margin:0}.amp-a,.amp-b{color:red}@media print{.amp-c{color:red}.amp-b i{top:0}}"
    assert style_for(style, '<i class="amp-b">') == "p{margin:0}.amp-a,.amp-b{color:red}@media print{.amp-b i{top:0}}"
