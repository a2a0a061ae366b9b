"""The verb that tells how close values come to overflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.verdicts.growing import growing


@pytest.fixture
def run(run_folder: Path) -> Path:
    return growing(run_folder).close()


def test_the_closest_are_told(ampscope: Command, run: Path) -> None:
    answer = ampscope("ranges", run, "--closest", "1")
    assert (answer.code, answer.err) == (0, "")
    assert "add in blocks.1" in answer.out
    assert "mm in blocks.0" not in answer.out


def test_json_holds_all_places_or_the_closest(ampscope: Command, run: Path) -> None:
    whole = json.loads(ampscope("ranges", run, "--json").out)
    assert len(whole["rows"]) == 6
    assert whole["sampled_share"] == 0.2
    promised = {"module", "op", "phase", "dtype", "headroom_bits", "underflow_share", "bits_per_step", "forecast_step"}
    assert promised <= whole["rows"][0].keys()
    assert whole["rows"][0]["underflow_share"] is None
    assert json.loads(ampscope("ranges", run, "--json", "--closest", "2").out)["rows"] == whole["rows"][:2]


def test_a_rank_that_is_not_there_is_an_error(ampscope: Command, run: Path) -> None:
    assert ampscope("ranges", run, "--rank", "0").code == 0
    answer = ampscope("ranges", run, "--rank", "3")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "ampscope: rank 3 has written nothing into this run; there are the ranks 0\n"


def test_it_needs_neither_torch_nor_the_app(run: Path) -> None:
    script = (
        "import sys; from ampscope.cli.main import app\n"
        f"app(['ranges', {str(run)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'streamlit', 'plotly', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
