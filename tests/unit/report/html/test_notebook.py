"""Results in Jupyter: HTML where a cell asks for it, text everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.overview.overview import overview
from ampscope.analysis.precision.precision import precision
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.notebook_repr import NotebookRepr
from tests.support.paths import SAMPLES
from tests.support.scenes import HOSTILE, SCENES

SAMPLE = SAMPLES / "clip-before-unscale"


@pytest.fixture(scope="module")
def run() -> ampscope.Run:
    return ampscope.open_run(SAMPLE)


def html(result: NotebookRepr) -> str:
    shown = result._repr_html_()
    assert shown is not None
    return shown


def test_a_run_shows_its_verdict_its_extent_and_its_time_line(run: ampscope.Run) -> None:
    shown = html(run)
    for part in ("Gradients clipped before they were unscaled", "optimizer steps", "gradient norm", "<style>"):
        assert part in shown


def test_a_diagnosis_and_its_items_show_what_to_change(run: ampscope.Run) -> None:
    diagnosis = ampscope.diagnose(run)
    assert diagnosis.primary is not None
    for result in (diagnosis, diagnosis.primary):
        assert "scaler.unscale_(optimizer)" in html(result)


def test_histories_show_their_curves(run: ampscope.Run) -> None:
    assert "loss scale" in html(overview(run))
    assert "growth tracker" in html(scale_history(run))
    assert "the whole step" in html(precision(run))


@pytest.mark.parametrize("scene", ["empty", "hostile", "finding"])
def test_whatever_a_trace_holds_is_text(scene: str, tmp_path: Path) -> None:
    SCENES[scene](tmp_path / "run").close()
    with ampscope.open_run(tmp_path / "run") as opened:
        results = (opened, ampscope.diagnose(opened), overview(opened), scale_history(opened), precision(opened))
        for shown in map(html, results):
            assert "<script" not in shown
            assert "<b>bold" not in shown
            assert HOSTILE[:20] not in shown


def test_text_stays_as_it_was(run: ampscope.Run) -> None:
    assert repr(run) == f"Run({str(SAMPLE)!r})"
    assert repr(ampscope.diagnose(run)).startswith("Diagnosis(schema=1, run=RunInfo(")


def test_a_run_that_cannot_be_read_any_more_falls_back_to_its_text(tmp_path: Path) -> None:
    SCENES["empty"](tmp_path / "run").close()
    opened = ampscope.open_run(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    assert opened._repr_html_() is None


def test_a_result_without_a_view_shows_its_text() -> None:
    @dataclass(frozen=True, slots=True)
    class Other(NotebookRepr):
        value: int

    assert Other(3)._repr_html_() is None


def test_a_notebook_holds_the_html() -> None:
    nbformat = pytest.importorskip("nbformat", reason="no Jupyter to try it in")
    client = pytest.importorskip("nbclient", reason="no Jupyter to try it in")
    pytest.importorskip("ipykernel", reason="no Jupyter to try it in")
    cell = nbformat.v4.new_code_cell(f"import ampscope\nampscope.open_run({str(SAMPLE)!r})")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client.NotebookClient(notebook, timeout=120).execute()
    (output,) = notebook.cells[0].outputs
    assert "Gradients clipped before they were unscaled" in output.data["text/html"]
    assert output.data["text/plain"].startswith("Run(")
