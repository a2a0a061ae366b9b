"""The table of the report: where its cells may break."""

from __future__ import annotations

from ampscope.report.html.tables_html import table_html


def test_a_long_name_may_break_after_a_dot_and_no_number_does() -> None:
    drawn = table_html(
        ("Difference",), [["The loss parts at step 0: 4.779 in transformer.blocks.0.attention, 1.02e7 in B."]]
    )
    assert "0: 4.779 in transformer.<wbr>blocks.0.<wbr>attention, 1.02e7 in B." in drawn
