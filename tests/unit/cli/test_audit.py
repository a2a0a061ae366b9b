"""The verb that ranks the layers of an audited step by what they lose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.trace.schema import AuditStatus
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.audited import audited, op_row

UNIT = 2.0**-11


@pytest.fixture
def run(run_folder: Path) -> Path:
    trace = TraceBuilder(run_folder)
    trace.step()
    calm, worst = trace.site(module="calm"), trace.site("aten.sub.Tensor", module="worst")
    rows = [
        op_row(calm, local=UNIT, contribution=1e-4, spread=1e-4),
        op_row(worst, local=0.0, inherited=0.5, total=0.5, operand_error=UNIT, inherited_spread=0.01, contribution=0.0),
    ]
    audited(trace, rows, not_measured=2, not_measured_ops=("mine.op.default",))
    trace.step()
    audited(trace, [], step=1, status=AuditStatus.UNAVAILABLE, reason="there is no room", source="")
    return trace.close()


def test_the_worst_layer_and_the_loss(ampscope: Command, run: Path) -> None:
    answer = ampscope("audit", run)
    assert (answer.code, answer.err) == (0, "")
    words = " ".join(answer.out.split())
    assert "worst loses most: the terms of sub at train.py:10 nearly cancel" in words
    assert 'ampscope.keep_fp32(model, ["worst"])' in words
    assert "Step 0, against the same in float32 (audited, too: 1)." in words
    assert (
        "The loss is 2.01 instead of 2: +0.01, 0.5 %. To first order, the errors that its ops make add +0.009." in words
    )
    assert "no gradient" not in words
    assert "missing" not in words
    assert "float8" not in words
    assert words.index("worst cancels") < words.index("calm rounds")
    assert "2 ops (mine.op.default)" in words


def test_what_the_sum_leaves_out_and_what_is_gone(ampscope: Command, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    cast = trace.site("aten._to_copy.default", module="calm", out_dtypes=("float8_e5m2",))
    audited(trace, [op_row(cast, local=UNIT)], ops=2)
    words = " ".join(ampscope("audit", trace.close()).out.split())
    assert "What values lose that ask for no gradient, as the batch by its own cast, is not in that." in words
    assert "What is float8 in the step is so in the reference, too" in words
    assert "Some rows of its ops are missing from the run: layers may have lost more than is told here." in words


def test_one_step_by_number(ampscope: Command, run: Path) -> None:
    assert "could not be audited: there is no room." in ampscope("audit", run, "--step", "1").out
    missing = ampscope("audit", run, "--step", "7")
    assert (missing.code, missing.out) == (2, "")
    assert "step 7 was not audited; audited are 0, 1" in missing.err


def test_json_has_the_promised_keys(ampscope: Command, run: Path) -> None:
    whole = json.loads(ampscope("audit", run, "--json").out)
    assert (whole["step"], whole["status"], whole["dtype"], whole["computes_in"]) == (0, "done", "float32", "float16")
    first = whole["layers"][0]
    assert (first["module"], first["kind"], first["moves_loss"]) == ("worst", "cancels", 0.01)
    assert first["worst"]["source"] == {
        "file": "train.py",
        "line": 10,
        "function": "train_step",
        "code": "out = model(x)",
    }
    assert [each["step"] for each in whole["audited"]] == [0, 1]
    assert {"loss_error", "explained", "not_measured_ops", "sentence", "code", "ops"} <= whole.keys()


def test_a_run_without_one_says_how_to_make_it(ampscope: Command, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    folder = trace.close()
    words = " ".join(ampscope("audit", folder).out.split())
    assert "No step of this run was audited." in words
    assert "scope.audit()" in words
    assert "audit_every=1000" in words
    assert "step 3 was not audited; none was" in ampscope("audit", folder, "--step", "3").err


def test_it_needs_neither_torch_nor_the_app(run: Path) -> None:
    script = (
        "import sys; from ampscope.cli.main import app\n"
        f"app(['audit', {str(run)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'streamlit', 'plotly', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
