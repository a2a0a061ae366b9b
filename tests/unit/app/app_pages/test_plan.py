"""The page that says which formats would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.trace.schema import Node, Phase, Source
from tests.support.page_reading import Show, Shown
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import statistics_of

NORMAL = np.random.default_rng(0).normal(size=512)
FLOAT32: dict[str, Any] = {"in_dtypes": ("float32",), "out_dtypes": ("float32",)}


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with exponents: one module fits everywhere, one is too large for float16, a gradient is small."""
    trace = TraceBuilder(tmp_path / "counted")
    trace.step(scale=64.0, traced=Source.LIVE)
    for module, size in (("calm", 1.0), ("large", 1e5)):
        site = trace.site(module=module, module_type="Linear", **FLOAT32)
        trace.op(site, source=Source.LIVE, **statistics_of(NORMAL * size))
    trace.param("third.weight")
    site = trace.site(Node.GRADIENT, name="third.weight", module="third", phase=Phase.BACKWARD, **FLOAT32)
    trace.op(site, source=Source.LIVE, **statistics_of(NORMAL * 1e-9 * 64.0))
    trace.close()
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))


def test_it_begins_with_the_answer_and_says_what_it_is_not(show: Show, counted: None) -> None:
    words = " ".join(show("counted", "plan", real=True).words.split())
    assert "bfloat16 would do for all 2 modules that were measured, float16 for 1, fp8 e4m3 for" in words
    assert "Only range is judged" in words
    assert "of others it is an estimate, for values in no order" in words


def test_each_cell_has_its_number_and_says_the_rest_under_the_pointer(show: Show, counted: None) -> None:
    (matrix,) = (body for body in show("counted", "plan", real=True).raw if "amp-matrix" in body and "<td" in body)
    large = matrix.partition('scope="row" title="Linear">large')[2].partition("</tr>")[0]
    assert '<td class="fits"' in large
    assert '<td class="up" style="--part:0.' in large
    assert "overflow</td>" in large
    assert "of 1 tensor and 0 gradients" in large
    assert '<td class="unknown"' in matrix.partition(">third<")[2]


def test_one_format_is_told_in_detail_with_its_code(show: Show, counted: None) -> None:
    shown = show("counted", "plan", real=True, format="float16")
    words = " ".join(shown.words.split())
    assert "float16 would do for 1 of the 2 modules that were measured; large should stay above it." in words
    assert 'ampscope.keep_fp32(model, [ "large", ])' in words
    assert "fp8" not in words
    assert "gradients: flushed" in words


def test_a_scale_that_is_too_small_for_a_gradient_is_seen(show: Show, counted: None) -> None:
    shown = show("counted", "plan", real=True)
    (bars,) = (body for body in shown.raw if "amp-windows" in body and "<figure" in body)
    assert bars.count('<i class="missed') == 2  # all together, and the only one
    assert "a larger scale would keep more of it" in bars
    assert "the scale used: 64 (2⁶)" in shown.words


def test_what_was_chosen_is_in_the_address(show: Show, counted: None) -> None:
    shown = show("counted", "plan", real=True)
    (box,) = (each for each in shown.test.selectbox if each.label == "Format")
    again = Shown(box.set_value("bfloat16").run())
    assert again.address["format"] == "bfloat16"
    assert "there is no int4 here" in show("counted", "plan", real=True, format="int4").words


def test_without_counted_exponents_it_says_how_to_get_them(seen: Show) -> None:
    words = seen("finding", "plan").words
    assert "No step of this run has counted exponents" in words
    assert "ampscope.watch(model, every=100)" in words


def test_scale_leads_here_and_back(show: Show, counted: None) -> None:
    assert "The scales at which each gradient fits" in show("counted", "scale", real=True).links
    assert "The loss scale's history" in show("counted", "plan", real=True).links
