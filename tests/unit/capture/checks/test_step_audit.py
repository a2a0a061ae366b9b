"""Audits of healthy steps: which are made, that training is the same to the last bit, and what each says."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.precision.audit import audit
from ampscope.capture.checks import audit_reference
from ampscope.capture.checks.audited_ops import OTHER_DRAWS, OpErrors
from ampscope.capture.checks.step_audit import EAGERLY
from ampscope.errors import WatchError
from ampscope.trace.schema import AuditStatus, EventKind, Node, Table
from tests.support.training.model_parts import grad_of
from tests.support.training.twin_runs import Watched, train_both
from tests.unit.capture.checks.audited_nets import WIDTH, Net, Shifted, audits, loop, ops, shifted

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def ask(step: int, **asked: Any) -> Any:
    """Asks for an audit before a step."""
    return lambda scope, now: scope.audit(**asked) if scope is not None and now == step else None


@HALVES
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_third_step_changes_no_bit(dtype: torch.dtype, micro_batches: int, run_folder: Path) -> None:
    training = loop(shifted(0.0, 0.0), dtype, micro_batches=micro_batches, steps=7)
    watched = train_both(training, run_folder, audit_every=3)
    assert [(row.step, row.status, row.dtype) for row in audits(watched)] == [
        (2, AuditStatus.DONE, "float32"),
        (5, AuditStatus.DONE, "float32"),
    ]
    assert watched.warnings == []
    rows = ops(watched, audits(watched)[0])
    assert {row.micro_batch for site, row in rows if site.op != Node.GRADIENT} == set(range(micro_batches))


@HALVES
@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_the_ops_add_up_to_the_error_of_the_loss(dtype: torch.dtype, reference: str, run_folder: Path) -> None:
    """To first order: the larger the errors, the less."""
    training = loop(
        shifted(300.0 if dtype is torch.float16 else 30.0, 0.0), dtype, steps=2, before=ask(1, dtype=reference)
    )
    (row,) = audits(train_both(training, run_folder))
    assert (row.status, row.dtype, row.not_measured, row.not_measured_ops) == (AuditStatus.DONE, reference, 0, ())
    assert row.loss is not None
    assert row.reference_loss is not None
    assert row.explained == pytest.approx(row.loss - row.reference_loss, rel=0.5)
    assert abs(row.loss - row.reference_loss) > 1e-4


def test_an_op_has_its_own_error_and_the_one_it_inherited(run_folder: Path) -> None:
    watched = train_both(loop(shifted(0.0, 1000.0), steps=2, before=ask(1)), run_folder)
    found = ops(watched, audits(watched)[0])
    block = {site.op: row for site, row in found if site.module == "blocks.1" and site.phase == "forward"}
    add, sub = block["aten.add.Tensor"], block["aten.sub.Tensor"]
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert 0 < (add.local or 0.0) < unit, "rounded as any sum is"
    assert (add.inherited or 0.0) < 1e-4, "beside 1000, what came before is nothing"
    assert sub.local == 0.0
    assert (sub.operand_error or 1.0) < unit
    assert (sub.inherited or 0.0) > 0.3
    assert sub.total == sub.inherited
    assert add.spread == max(row.spread or 0.0 for _, row in found)
    assert sub.inherited_spread == pytest.approx(add.spread, rel=0.5), "the same error, as it comes through"


def test_gradients_of_parameters_have_rows(run_folder: Path) -> None:
    watched = train_both(loop(shifted(0.0), steps=2, before=ask(1)), run_folder)
    gradients = {site.name: row for site, row in ops(watched, audits(watched)[0]) if site.op == "gradient"}
    assert {"head.weight", "blocks.0.fc.bias", "norm.weight"} <= gradients.keys()
    assert 1e-4 < (gradients["blocks.0.fc.weight"].total or 0.0) < 0.1


def test_the_op_rows_are_those_of_the_trace(run_folder: Path) -> None:
    watched = train_both(loop(shifted(0.0), steps=2, before=ask(1)), run_folder)
    (row,) = audits(watched)
    traced = {(op.seq, op.out): op.site for op in watched.run.rows(Table.OPS, step=1, source=row.source)}
    assert {(op.seq, op.out): op.site for _, op in ops(watched, row)}.items() <= traced.items()


def test_in_float64_float32_is_rounded_too(run_folder: Path) -> None:
    watched = train_both(loop(shifted(0.0), steps=2, before=ask(1, dtype=torch.float64)), run_folder)
    (row,) = audits(watched)
    norms = [op.local for site, op in ops(watched, row) if site.op == "aten.native_batch_norm.default"]
    assert norms
    assert 1e-9 < max(local or 0.0 for local in norms) < 1e-6
    assert row.loss != row.reference_loss


def test_a_bad_step_is_never_audited_and_the_next_healthy_one_is(run_folder: Path) -> None:
    training = loop(
        shifted(0.0), torch.float16, before=ask(2), spoil=lambda step, loss: loss * (2.0**40 if step in (2, 3) else 1.0)
    )
    watched = train_both(training, run_folder)
    assert {row.step for row in watched.incidents} == {2, 3}
    assert [row.step for row in audits(watched)] == [4]


def test_one_that_finds_no_healthy_step_says_so(run_folder: Path) -> None:
    watched = train_both(loop(shifted(0.0), steps=2, before=ask(1)), run_folder)
    assert audits(watched)
    again = Watched.train(loop(shifted(0.0), steps=0, before=ask(0)), run_folder / "other")
    assert audits(again) == []
    scope = ampscope.watch(nn.Linear(2, 2), dir=run_folder / "none", quiet=True)
    scope.audit()
    scope.close()
    with ampscope.open_run(run_folder / "none") as run:
        notes = [row.text for row in run.rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert notes == ["an audit was asked for, and no healthy step came after that"]


def test_it_can_be_configured_while_the_run_trains(run_folder: Path) -> None:
    def before(scope: Any, step: int) -> None:
        if scope is not None and step == 2:
            scope.configure(audit_every=2)

    watched = train_both(loop(shifted(0.0), before=before), run_folder)
    assert [row.step for row in audits(watched)] == [3, 5]


def test_other_turns_begin_where_they_are_asked_for(run_folder: Path) -> None:
    def before(scope: Any, now: int) -> None:
        if scope is not None and now in (4, 12):
            scope.configure(audit_every={4: 5, 12: 2}[now])

    training = loop(shifted(0.0), torch.bfloat16, steps=16, before=before)
    rows = audits(train_both(training, run_folder, audit_every=1))
    assert [row.step for row in rows] == [0, 1, 2, 3, 4, 9, 13, 15]


def test_outputs_that_nothing_uses_have_no_gradient(run_folder: Path) -> None:
    """Statistics of a norm, and a part of a split: autograd tells their hooks of none."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.GroupNorm(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            used, _ = self.fc(x).chunk(2, -1)
            out: Tensor = self.norm(used)
            return out

    training = loop(lambda: Net([Uneven()]), torch.bfloat16, steps=2, before=ask(1))
    (row,) = audits(train_both(training, run_folder))
    assert (row.status, row.reason) == (AuditStatus.DONE, "")
    assert row.explained is not None


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_of_a_compiled_model_it_says_how_it_was_run(compiled: bool, run_folder: Path) -> None:
    def make() -> nn.Module:
        net = Net([Shifted(0.0)])
        if compiled:
            net.compile(backend="eager")
        return net

    torch._dynamo.reset()
    try:
        (row,) = audits(train_both(loop(make, steps=2, before=ask(1)), run_folder))
    finally:
        torch._dynamo.reset()
    assert (row.status, row.reason) == (AuditStatus.DONE, EAGERLY if compiled else "")


def test_compiled_code_that_gives_other_numbers_is_no_riddle(run_folder: Path) -> None:
    def other_numbers(graph: Any, _: Any) -> Any:
        return lambda *given: tuple(result * 1.5 for result in graph.forward(*given))

    def make() -> nn.Module:
        model = Shifted(0.0)
        model.compile(backend=other_numbers)
        return model

    torch._dynamo.reset()
    try:
        (row,) = audits(train_both(loop(make, steps=2, before=ask(1)), run_folder))
    finally:
        torch._dynamo.reset()
    assert row.status == AuditStatus.UNAVAILABLE
    assert row.reason.startswith(
        "a replay is not the step: the output of Shifted differs; the loss differs; what torch.c"
    )
    assert row.reason.endswith(f"{EAGERLY}: audit a step without torch.compile")


def test_what_asks_for_no_gradient_is_left_out_of_the_sum(run_folder: Path) -> None:
    """The first layer's cast of the batch; behind a norm that has weights nothing is left out."""
    bare = audit(train_both(loop(lambda: nn.Linear(WIDTH, 10), steps=2, before=ask(1)), run_folder / "bare").run)
    net = audit(train_both(loop(shifted(0.0), steps=2, before=ask(1)), run_folder / "net").run)
    assert bare is not None
    assert net is not None
    assert (bare.leaves_out, net.leaves_out) == (True, False)


def test_what_cannot_be_asked_for(run_folder: Path) -> None:
    with pytest.raises(WatchError, match="audit_every=-1"):
        ampscope.watch(nn.Linear(2, 2), dir=run_folder, audit_every=-1)
    with ampscope.watch(nn.Linear(2, 2), dir=run_folder, quiet=True) as scope, pytest.raises(WatchError, match="int8"):
        scope.audit("int8")


class Noisy(nn.Module):
    """Draws in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, dtype=x.dtype) * 0.1


class Scattered(nn.Module):
    """Draws around values, and others around those of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.normal(x.detach(), 0.1)


class Half(torch.autograd.Function):
    """Takes nothing but bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            raise TypeError("half precision alone")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Fussy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Half.apply(x.bfloat16())
        return doubled


def test_other_random_numbers_are_not_taken_for_errors(run_folder: Path) -> None:
    watched = train_both(
        loop(
            lambda: Net([nn.Sequential(nn.Linear(WIDTH, WIDTH), Scattered())]), steps=2, before=ask(1, dtype="float64")
        ),
        run_folder,
    )
    (row,) = audits(watched)
    found = ops(watched, row)
    assert (row.status, row.reason) == (AuditStatus.PARTIAL, OTHER_DRAWS)
    assert all(op.total is None and op.inherited is None for _, op in found)
    assert max(op.local or 0.0 for _, op in found) > 0


def test_the_reference_draws_what_the_step_drew(run_folder: Path) -> None:
    noisy = loop(
        lambda: Net([nn.Sequential(nn.Linear(WIDTH, WIDTH), Noisy())]), steps=2, before=ask(1, dtype="float64")
    )
    watched = train_both(noisy, run_folder)
    (row,) = audits(watched)
    assert (row.status, row.reason) == (AuditStatus.DONE, "")
    assert any(op.inherited for _, op in ops(watched, row))


def test_code_that_takes_no_other_dtype_is_measured_op_by_op(run_folder: Path) -> None:
    watched = train_both(loop(lambda: Net([Fussy()]), steps=2, before=ask(1)), run_folder)
    (row,) = audits(watched)
    assert row.status == AuditStatus.PARTIAL
    assert "could not be run in the reference dtype: TypeError while replaying: half precision alone" in row.reason
    assert row.reference_loss is None
    assert row.explained is not None


@torch.library.custom_op("ampscope_audit_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError("half precision alone")
    return x * 2


twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = twice(x.bfloat16()) if torch.is_autocast_enabled("cpu") else x * 2
        return doubled


def test_an_op_that_cannot_be_widened_is_named(run_folder: Path) -> None:
    watched = train_both(loop(lambda: Net([Custom()]), steps=2, before=ask(1)), run_folder)
    (row,) = audits(watched)
    assert (row.status, row.not_measured) == (AuditStatus.DONE, 1)
    assert row.not_measured_ops == ("ampscope_audit_test.twice.default",)
    (measured,) = [op for site, op in ops(watched, row) if site.op == row.not_measured_ops[0]]
    assert measured.local is None
    assert measured.contribution is None


def test_a_loop_that_moves_weights_by_itself_is_audited(run_folder: Path) -> None:
    def by_hand(watch: Any) -> Any:
        model = Net([Shifted(0.0)])
        watch(model)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, WIDTH)).float().square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(grad_of(weight), alpha=0.01)
        return model

    rows = audits(train_both(by_hand, run_folder, audit_every=1))
    assert [(row.step, row.status, row.reason) for row in rows] == [(step, AuditStatus.DONE, "") for step in range(3)]
    assert all(row.explained == pytest.approx((row.loss or 0) - (row.reference_loss or 0), abs=1e-3) for row in rows)


def test_gradients_that_are_asked_for_tell_the_same(run_folder: Path) -> None:
    def explained(asks: Any, folder: Path) -> float | None:
        def train(watch: Any) -> Any:
            model = Net([Shifted(0.0)])
            watch(model)
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(4, WIDTH)).float().square().mean()
                gradients = asks(loss, list(model.parameters()))
                with torch.no_grad():
                    for weight, gradient in zip(model.parameters(), gradients, strict=True):
                        weight.sub_(gradient, alpha=0.01)
            return model

        return audits(train_both(train, folder, audit_every=1))[0].explained

    def by_backward(loss: Tensor, weights: list[Tensor]) -> list[Tensor]:
        for weight in weights:
            weight.grad = None
        loss.backward()
        return list(map(grad_of, weights))

    asked = explained(torch.autograd.grad, run_folder / "asked")
    assert asked is not None
    assert asked == explained(by_backward, run_folder / "backward") != 0.0


class Repeats(nn.Module):
    """Computes once more in half precision at the same line: the executions do not have the same ops there."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.dtype is torch.bfloat16
        for _ in range(2 if half else 1):
            x = torch.tanh(x)
        return x


def test_ops_that_ran_another_number_of_times_are_not_compared(run_folder: Path) -> None:
    training = loop(lambda: Net([nn.Sequential(nn.Linear(WIDTH, WIDTH), Repeats())]), steps=2, before=ask(1))
    watched = train_both(training, run_folder)
    found = ops(watched, audits(watched)[0])
    tanh = [row for site, row in found if site.op == "aten.tanh.default"]
    assert len(tanh) == 2
    assert all(row.total is None and row.inherited is None and (row.local or 0) > 0 for row in tanh)
    assert all(row.total is not None for site, row in found if site.op == "aten.addmm.default")


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(1, 2, -1, WIDTH)
        return F.scaled_dot_product_attention(parts, parts, parts, is_causal=True).reshape(x.shape)


def test_attention_kernels_for_half_precision_alone_are_measured(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the host, taken for one that does not know float32, has the same errors by other code."""
    training = loop(lambda: Net([nn.Sequential(nn.Linear(WIDTH, WIDTH), Attends())]), steps=2, before=ask(1))
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"

    def locals_of(folder: Path) -> float:
        watched = train_both(training, folder)
        (row,) = audits(watched)
        assert row.not_measured == 0
        (attention,) = [op for site, op in ops(watched, row) if site.op == name and op.out == 0]
        assert attention.local is not None
        return attention.local

    by_itself = locals_of(run_folder / "itself")
    monkeypatch.setattr(audit_reference, "HALF_ATTENTION", frozenset({name}))
    assert locals_of(run_folder / "other") == pytest.approx(by_itself, rel=1e-3)


class Edits(nn.Module):
    """Writes into a weight within its forward: such a step cannot be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(0.99)
        out: Tensor = self.fc(x)
        return out


def test_a_step_that_cannot_be_run_again_says_why(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watched = train_both(loop(lambda: Net([Edits()])), run_folder, audit_every=2, quiet=False)
    rows = audits(watched)
    assert [row.step for row in rows] == [1, 3, 5]
    assert {row.status for row in rows} == {AuditStatus.UNAVAILABLE}
    assert "forward" in rows[0].reason
    said = [line for line in capfd.readouterr().err.splitlines() if "could not be audited" in line]
    assert said == [f"ampscope: step 1 could not be audited: {rows[0].reason}"]


def test_a_step_whose_weights_had_moved_is_not_audited(run_folder: Path) -> None:
    """As in sharpness-aware minimisation: the second evaluation is of other weights than the step ends with."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, dir=run_folder, quiet=True, audit_every=1):
        for _ in range(3):
            for moved in (0.05, -0.05):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.ones(8, WIDTH)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.add_(moved)
            optimizer.step()
    rows = ampscope.open_run(run_folder).rows(Table.AUDITS)
    assert {row.status for row in rows} == {AuditStatus.UNAVAILABLE}
    assert all("weights" in row.reason for row in rows)


def test_it_lets_go_of_everything(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    measured = OpErrors._measure

    def noting(self: OpErrors, output: Any, result: Tensor, wide: Tensor | None, known: Tensor | None) -> None:
        measured(self, output, result, wide, known)
        seen.extend(weakref.ref(each) for each in (result, wide, known) if each is not None)
        seen.extend(weakref.ref(each.error) for each in self._awaited if each.error is not None)

    def before(scope: Any, step: int) -> None:
        if scope is not None and step == 2:
            scope.audit()
        if scope is not None and step == 3:
            alive.extend(each() is not None for each in seen)

    monkeypatch.setattr(OpErrors, "_measure", noting)
    gc.disable()
    try:
        watched = Watched.train(loop(shifted(0.0), steps=4, before=before), run_folder)
    finally:
        gc.enable()
    assert [row.status for row in audits(watched)] == [AuditStatus.DONE]
    assert len(alive) > 50
    assert not any(alive)


@pytest.mark.parametrize("part", ["after", "before", "_settle", "_arrived"])
def test_a_fault_ends_audits_and_nothing_else(part: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("ampscope.capture.torch_support.guard.RAISE", False)
    monkeypatch.setattr(OpErrors, part, fails)
    with pytest.warns(RuntimeWarning, match="the audit"):
        watched = train_both(loop(shifted(0.0), torch.float16), run_folder, audit_every=2)
    assert not [row for row in audits(watched) if row.status == AuditStatus.DONE]
    assert len(watched.steps) == 6
