from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope import diagnose, open_run
from ampscope.analysis.overview.rank_lives import ranks_at_a_glance
from ampscope.report.figures.step_figures import rank_grid
from ampscope.report.html.bars_svg import rank_grid_html
from ampscope.report.html.report_page import page
from ampscope.report.terminal.diagnosis_text import as_text
from ampscope.trace.read.run import Run
from tests.support.printed import printed
from tests.support.scenes import BAD_STEP, healthy, ranks


@pytest.fixture
def run(run_folder: Path) -> Iterator[Run]:
    ranks(run_folder).close()
    with open_run(run_folder) as opened:
        yield opened


def test_the_report_has_a_section_of_ranks_with_their_picture(run: Run) -> None:
    html = page(run, diagnose(run))
    assert "The ranks" in html
    assert f'title="rank 1, step {BAD_STEP}: a bad value was born here"' in html
    assert 'title="rank 2, steps 50 to 79: differs from its replicas"' in html
    assert "not in this trace" in html


def test_a_run_of_one_rank_has_none(run_folder: Path) -> None:
    healthy(run_folder).close()
    with open_run(run_folder) as run:
        assert "amp-grid-row" not in page(run, diagnose(run)).split("</style>")[1]


def test_the_terminal_says_it_in_words(run: Run) -> None:
    text = printed(as_text(diagnose(run)))
    assert "GPT" in text
    assert "4 ranks (nothing of rank 3)" in text
    assert "step 40 on rank 1 of 4" in text
    assert "Ranks 0 and 2 received it." in text


def test_cells_that_are_alike_are_one_stretch(run: Run) -> None:
    figure = rank_grid(ranks_at_a_glance(run).grid)
    assert [len(row.stretches) for row in figure.rows] == [3, 3, 4, 1]
    assert all(sum(each.width for each in row.stretches) == pytest.approx(1.0) for row in figure.rows)
    assert [words for _, words in figure.ticks] == ["0", "20", "40", "60"]
    assert rank_grid_html(figure).count("<i") == 11 + len(figure.key)
