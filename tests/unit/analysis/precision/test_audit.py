"""What the rows of an audit come to: the ranking of layers, what is told of them, and what is noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.analysis.precision.audit import AuditReport, audit, in_words
from ampscope.analysis.precision.op_losses import BACKWARD_CODE, GROWS, LOUD, PrecisionLoss
from ampscope.trace.schema import LOSS_CODE, AuditOpRow, AuditStatus, Node, Phase
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.audited import audited, op_row

BF16 = ("bfloat16",)
UNIT = 2.0**-8


class Step:
    """An audited step, op by op."""

    def __init__(self, folder: Path) -> None:
        self.trace = TraceBuilder(folder)
        self.trace.step()
        self.rows: list[AuditOpRow] = []

    def op(self, op: str = "mm", module: str = "fc", *, site: dict[str, Any] | None = None, **columns: Any) -> int:
        facts = {"module": module, "in_dtypes": BF16, "out_dtypes": BF16, **(site or {})}
        number = self.trace.site(f"aten.{op}.default", **facts)
        self.rows.append(op_row(number, **columns))
        return number

    def audit(self, **columns: Any) -> AuditReport:
        audited(self.trace, self.rows, **columns)
        with ampscope.open_run(self.trace.close()) as run:
            found = audit(run)
        assert found is not None
        return found


@pytest.fixture
def step(run_folder: Path) -> Step:
    return Step(run_folder)


def test_layers_by_what_moves_the_loss(step: Step) -> None:
    step.op(module="a", local=UNIT, contribution=1e-3, spread=1e-3)
    step.op(module="b", local=UNIT, contribution=-4e-3, spread=2e-3)
    step.op(module="b", local=UNIT, contribution=3e-3, spread=1e-3)
    found = step.audit()
    assert [layer.module for layer in found.layers] == ["b", "a"]
    worst = found.layers[0]
    assert worst.moves_loss == pytest.approx(5e-3), "of two ops, as errors of random signs"
    assert worst.contribution == pytest.approx(-1e-3)
    assert worst.absolute == pytest.approx(7e-3)
    assert found.layers[1].share is None, "of nothing, no share"
    assert found.sentence == "No layer stands out: every op rounds as bfloat16 must. b moves the loss most."
    assert found.loss_error == pytest.approx(0.01)
    assert found.explained == 0.009
    assert not found.rows_missing
    assert not found.in_float8
    assert found.code == ""


def test_an_error_that_happens_to_add_up_to_nothing_counts_all_the_same(step: Step) -> None:
    step.op(module="lucky", local=UNIT, contribution=0.0, spread=5e-3)
    step.op(module="other", local=UNIT, contribution=1e-3, spread=1e-3)
    assert [layer.module for layer in step.audit().layers] == ["lucky", "other"]


def test_a_difference_counts_for_the_errors_that_it_lets_through(step: Step) -> None:
    first = step.op("addmm", "left", local=UNIT / 2, contribution=0.02, spread=0.03, total=UNIT / 2)
    second = step.op("addmm", "right", local=UNIT / 2, contribution=0.01, spread=0.029, total=UNIT / 2)
    sub = step.op(
        "sub",
        "difference",
        local=0.0,
        inherited=0.5,
        total=0.5,
        operand_error=UNIT / 2,
        contribution=0.0,
        inherited_spread=0.0425,
    )
    for arg, source in enumerate((first, second)):
        step.trace.edge(source, sub, source="audit", arg=arg)
    found = step.audit()
    assert [layer.module for layer in found.layers] == ["difference", "left", "right"]
    assert [layer.kind for layer in found.layers] == [PrecisionLoss.CANCELS, PrecisionLoss.ROUNDS, PrecisionLoss.ROUNDS]
    assert found.rounded_in == ("left", "right")
    assert found.sentence == (
        "difference loses most: the terms of sub at train.py:10 nearly cancel, and their error, rounded in left and "
        "right, grows from 0.2 % to 50 % of what is left."
    )
    assert found.code == 'ampscope.keep_fp32(model, ["difference", "left", "right"])'


def test_it_counts_for_all_that_reaches_the_loss_through_it_alone(step: Step) -> None:
    """Its operands' errors may be of one sign, which a sample of its own does not tell."""
    cast = step.op("_to_copy", "left", local=UNIT / 2, contribution=0.04, spread=0.01)
    left = step.op("addmm", "left", local=UNIT / 2, contribution=0.03, spread=0.03)
    right = step.op("addmm", "right", local=UNIT / 2, contribution=0.0, spread=0.5)
    sub = step.op(
        "sub", "difference", local=0.0, inherited=0.5, total=0.5, operand_error=UNIT / 2, inherited_spread=0.02
    )
    other = step.op("mul", "other", local=0.0)
    gradient = step.op("mm", "left", local=0.0, site={"phase": Phase.BACKWARD})
    for before, after in ((cast, left), (left, sub), (right, sub), (right, other), (left, gradient)):
        step.trace.edge(before, after, source="audit")
    found = step.audit()
    assert [layer.module for layer in found.layers] == ["right", "difference", "left", "other"]
    assert found.layers[1].moves_loss == pytest.approx(0.05), "the cast's and the product's, not what others read, too"


@pytest.mark.parametrize(
    "columns",
    [
        {"inherited": GROWS * UNIT * 0.9},
        {"inherited": LOUD * UNIT * 0.9, "operand_error": UNIT / 100},
        {"inherited_spread": None},
    ],
    ids=["it grows too little", "it stays small", "it is no part of the loss"],
)
def test_what_is_no_cancellation(columns: dict[str, Any], step: Step) -> None:
    known = {"inherited": 0.5, "total": 0.5, "operand_error": UNIT, "inherited_spread": 0.1, "spread": 1e-3}
    step.op("sub", local=0.0, **(known | columns))
    assert [layer.kind for layer in step.audit().layers] == [PrecisionLoss.NOTHING]


def test_a_function_that_is_steep_does_not_cancel(step: Step) -> None:
    step.op("exp", local=UNIT, inherited=0.5, total=0.5, operand_error=UNIT, inherited_spread=0.1, spread=1e-3)
    assert [layer.kind for layer in step.audit().layers] == [PrecisionLoss.ROUNDS]


def test_an_op_far_off_on_its_own_operands_is_coarse(step: Step) -> None:
    step.op("mm", "calm", local=UNIT, contribution=1e-4, spread=1e-4)
    step.op("cumsum", "running", local=20 * UNIT, contribution=2e-3, spread=1e-3)
    found = step.audit()
    assert found.layers[0].kind is PrecisionLoss.COARSE
    assert found.sentence == (
        "running loses most: cumsum at train.py:10 is off by 7.8 % on its own operands, 20 times what one rounding to "
        "bfloat16 takes."
    )


def test_what_stands_out_and_moves_the_loss_less_is_told_after_what_moves_it_most(step: Step) -> None:
    step.op("mm", "head", local=UNIT, contribution=1e-2, spread=1e-2)
    step.op("cumsum", "", local=20 * UNIT, contribution=1e-4, spread=1e-4, site={"phase": Phase.LOSS})
    found = step.audit()
    assert found.layers[1].module == LOSS_CODE
    assert found.sentence.startswith("head moves the loss most. Less for the loss, in the code of the loss: cumsum")
    assert found.code == ""


def test_backward_counts_for_the_layer_of_the_op_whose_gradient_it_makes(step: Step) -> None:
    backward = {"module": "", "phase": Phase.BACKWARD}
    for number, phase in enumerate((Phase.LOSS, Phase.FORWARD)):
        forward = step.op("mm", local=UNIT, spread=1e-2 / (number + 1), site={"module": "", "phase": phase})
        step.op(f"of_{phase}", local=UNIT, site=backward | {"forward_site": forward})
    step.op("copy_", local=0.0, site=backward)
    found = step.audit()
    assert {op.op: op.layer for op in found.ops if op.phase == Phase.BACKWARD} == {
        "aten.of_loss.default": LOSS_CODE,
        "aten.of_forward.default": "",
        "aten.copy_.default": BACKWARD_CODE,
    }
    assert [(layer.module, in_words(layer)) for layer in found.layers] == [
        (LOSS_CODE, "The code of the loss"),
        ("", "The model's own forward"),
        (BACKWARD_CODE, "Backward outside the layers"),
    ]


def test_nothing_in_backward_outside_the_layers_is_kept_in_float32(step: Step) -> None:
    step.op("sum", "", local=20 * UNIT, contribution=1.0, spread=1.0, site={"phase": Phase.BACKWARD})
    found = step.audit()
    assert found.sentence.startswith("Backward outside the layers loses most: sum")
    assert found.code == ""


@pytest.mark.parametrize(
    ("columns", "site", "left_out"),
    [
        ({"local": UNIT}, {"phase": Phase.FORWARD}, True),
        ({"local": UNIT, "contribution": 0.0}, {"phase": Phase.FORWARD}, False),
        ({"local": 0.0}, {"phase": Phase.FORWARD}, False),
        ({"local": UNIT}, {"phase": Phase.BACKWARD}, False),
        ({"local": UNIT}, {"phase": Phase.FORWARD, "module": "checkpointed"}, False),
    ],
    ids=["the batch's cast", "a weight's cast", "exact", "a gradient", "run again with gradients"],
)
def test_what_asks_for_no_gradient_is_left_out(
    columns: dict[str, Any], site: dict[str, Any], left_out: bool, step: Step
) -> None:
    step.op("_to_copy", site=site, **columns)
    step.op("mm", "checkpointed", local=UNIT, contribution=1e-3, site={"phase": Phase.RECOMPUTE})
    assert step.audit().leaves_out is left_out


def test_float8_is_in_the_reference_too(step: Step) -> None:
    step.op(local=UNIT, contribution=1e-3, spread=1e-3)
    step.op("_to_copy", local=2.0**-4, contribution=1e-3, spread=1e-3, site={"out_dtypes": ("float8_e4m3fn",)})
    assert step.audit().in_float8


def test_the_gradient_of_a_parameter_counts_for_its_module(step: Step) -> None:
    step.op(module="fc", local=UNIT, spread=1e-3)
    for name, total in (("fc.bias", 0.01), ("fc.weight", 0.2)):
        site = step.trace.site(Node.GRADIENT, name=name, module="fc")
        step.rows.append(op_row(site, total=total, local=UNIT))
    (layer,) = step.audit().layers
    assert (layer.gradient, layer.gradient_local) == ("fc.weight", UNIT)
    assert layer.gradient_error == pytest.approx(0.2)


def test_without_a_reference_what_ops_do_by_themselves_is_left(step: Step) -> None:
    step.op(local=UNIT, contribution=1e-3, spread=1e-3)
    found = step.audit(status=AuditStatus.PARTIAL, reason="no room", reference_loss=None)
    assert (found.loss_error, found.reason) == (None, "no room")
    assert found.layers[0].contribution == 1e-3


def test_a_step_in_float32_has_nothing_to_lose(step: Step) -> None:
    step.op(local=0.0, site={"in_dtypes": ("float32",), "out_dtypes": ("float32",)})
    assert step.audit().sentence.startswith("Nothing in the step is rounded")


def test_of_a_step_whose_ops_were_not_measured_nothing_is_promised(step: Step) -> None:
    found = step.audit(not_measured=2, not_measured_ops=("mine.op.default",))
    assert found.sentence == "Nothing that could be measured in the step is rounded to less than the reference."


def test_rows_that_are_gone_are_not_taken_for_nothing_lost(step: Step) -> None:
    found = step.audit(ops=192)
    assert found.sentence == (
        "The rows of the step's ops are missing from the run: which layer loses what is not known."
    )
    assert (found.rows_missing, found.measured, found.layers) == (True, 192, ())


def test_some_rows_that_are_gone_are_told(step: Step) -> None:
    step.op(local=UNIT, contribution=1e-3, spread=1e-3)
    assert step.audit(ops=2).rows_missing


def test_program_points_that_are_gone_are_missing_rows(step: Step) -> None:
    step.rows.append(op_row(99, local=UNIT))
    found = step.audit()
    assert found.rows_missing
    assert found.sentence.startswith("The rows of the step's ops are missing")


def test_one_that_could_not_be_made_says_why(step: Step) -> None:
    found = step.audit(status=AuditStatus.UNAVAILABLE, reason="the model is sharded", source="")
    assert found.sentence == "The step could not be audited: the model is sharded."
    assert found.layers == ()


def test_which_step_is_chosen(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for number in range(4):
        trace.step()
        unmade = {"status": AuditStatus.UNAVAILABLE, "reason": "no room"} if number == 3 else {}
        audited(trace, [], step=number, **unmade) if number != 1 else None
    with ampscope.open_run(trace.close()) as run:
        newest = audit(run)
        assert newest is not None
        assert newest.step == 2, "the newest that could be made"
        assert [each.step for each in newest.audited] == [0, 2, 3]
        asked = audit(run, step=3)
        assert asked is not None
        assert asked.status == AuditStatus.UNAVAILABLE
        assert audit(run, step=1) is None


def test_a_run_without_an_audit(run_folder: Path) -> None:
    with ampscope.open_run(TraceBuilder(run_folder).close()) as run:
        assert audit(run) == AuditReport()


def test_executions_of_one_line_are_one_op(step: Step) -> None:
    site = step.op(local=UNIT / 2, contribution=1e-3, spread=1e-3)
    step.rows.append(op_row(site, seq=site + 9, local=UNIT, contribution=1e-3, spread=1e-3))
    (found,) = step.audit().ops
    assert (found.executions, found.local, found.seq) == (2, UNIT, site + 9)
    assert found.contribution == pytest.approx(2e-3)
    assert found.rounding == pytest.approx(2**0.5 * 1e-3)
    assert replace(found, operand_error=UNIT, total=2 * UNIT).growth == 2.0
