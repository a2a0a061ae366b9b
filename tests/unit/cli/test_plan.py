"""The verb that says which modules could compute in a narrower format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ampscope.trace.schema import Source
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import statistics_of

NORMAL = np.random.default_rng(0).normal(size=512)


@pytest.fixture
def run(run_folder: Path) -> Path:
    trace = TraceBuilder(run_folder)
    trace.step(scale=None, traced=Source.LIVE)
    for module, size in (("calm", 1.0), ("large", 1e5)):
        site = trace.site(module=module, module_type="Linear", in_dtypes=("float32",), out_dtypes=("float32",))
        trace.op(site, source=Source.LIVE, **statistics_of(NORMAL * size))
    return trace.close()


def test_modules_by_formats_and_the_plan_as_code(ampscope: Command, run: Path) -> None:
    answer = ampscope("plan", run)
    assert (answer.code, answer.err) == (0, "")
    words = " ".join(answer.out.split())
    assert "By the exponents of 1 step as it ran, up to step 0." in words
    assert "large fits fits overflow" in words
    assert 'ampscope.keep_fp32(model, [ "large", ])' in words
    assert "convert_to_float8_training(model, module_filter_fn=is_lower)" in words


def test_one_format_in_detail(ampscope: Command, run: Path) -> None:
    words = " ".join(ampscope("plan", run, "--to", "fp16").out.split())
    assert "stays up" in words
    assert "not measured" in words  # no gradients
    assert "fp8" not in words
    assert "Every module that was measured fits it." in " ".join(ampscope("plan", run, "--to", "bf16").out.split())


def test_json_has_the_promised_keys(ampscope: Command, run: Path) -> None:
    whole = json.loads(ampscope("plan", run, "--json").out)
    first = whole["modules"][0]
    assert (first["module"], whole["scale_window"]) == ("calm", [None, None])
    assert {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "tf32"} <= first["formats"].keys()
    assert {"overflow_share", "lost_share", "subnormal_share"} <= first["formats"]["float16"].keys()
    assert first["formats"]["float16"]["gradient_lost_share"] is None
    one = json.loads(ampscope("plan", run, "--json", "--to", "e5m2").out)
    assert one["modules"][0]["formats"] == {"float8_e5m2": first["formats"]["float8_e5m2"]}


def test_a_format_that_is_none_is_an_error(ampscope: Command, run: Path) -> None:
    answer = ampscope("plan", run, "--to", "int8")
    assert (answer.code, answer.out) == (2, "")
    assert "'int8' is no format that can be planned; there are tf32, bfloat16" in answer.err


def test_a_run_without_counts_says_how_to_get_them(ampscope: Command, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    words = " ".join(ampscope("plan", trace.close()).out.split())
    assert "No step of this run has counted exponents" in words
    assert "every=100" in words


@pytest.mark.parametrize("verb", ["plan", "scale"])
def test_they_need_neither_torch_nor_the_app(verb: str, run: Path) -> None:
    script = (
        "import sys; from ampscope.cli.main import app\n"
        f"app([{verb!r}, {str(run)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'torchao', 'streamlit', 'plotly', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
