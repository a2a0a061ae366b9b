"""A run that ends with an error shows the call that raised; a loop that goes on, or stops on purpose, is left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

Loss = Callable[[Tensor], Tensor]
#: The step that raises.
LAST = 2


class Scores(nn.Module):
    """Masks its input with a number that only float32 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest = -1e9

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, self.lowest)


class Net(nn.Module):
    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.part = part or nn.Identity()

    def forward(self, x: Tensor, *, raises: bool) -> Tensor:
        h = self.body(x)
        return self.part(h.half()).float() if raises else h


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient.half().masked_fill(gradient > 0, 1e9)


class EarlyStop(Exception):
    """The loop has seen enough."""


def plain(out: Tensor) -> Tensor:
    return out.mean()


def filled(out: Tensor) -> Tensor:
    return (out.half() * torch.full_like(out.half(), -1e9)).sum()


def mixed(out: Tensor) -> Tensor:
    return (out @ out.double().t()).sum()


def refused_in_backward(out: Tensor) -> Tensor:
    return _Refuses.apply(out).mean()


def stops(_: Tensor) -> Tensor:
    raise EarlyStop


def trained(folder: Path, loss: Loss, *, part: nn.Module | None = None, goes_on: bool = False) -> Diagnosis:
    """Steps of which one fails; a loop that goes on catches the error and makes another, any other is left by it."""
    torch.manual_seed(0)
    model = Net(part)
    scope = ampscope.watch(model, dir=folder, quiet=True)
    with contextlib.suppress(RuntimeError, EarlyStop):
        loop(model, loss, goes_on=goes_on)
    scope.close()
    return ampscope.diagnose(folder)


def loop(model: nn.Module, loss: Loss, *, goes_on: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(LAST + (2 if goes_on else 1)):
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError) if goes_on else contextlib.nullcontext():
            (loss if step == LAST else plain)(model(torch.randn(4, 8), raises=step == LAST)).backward()
            optimizer.step()


def without_half(out: Tensor) -> Tensor:
    """Asks for a determinant in float16, which torch has in no half precision."""
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.logdet(out.t().half() @ out.half())


@pytest.mark.parametrize(("loss", "helps"), [(without_half, "in float32"), (mixed, "to one dtype")])
def test_a_call_that_half_precision_has_not_is_to_run_in_float32(loss: Loss, helps: str, run_folder: Path) -> None:
    told = trained(run_folder, loss).primary
    assert isinstance(told, Incident)
    assert (told.cause, told.step) == (Cause.EXCEPTION, LAST)
    assert helps in told.remedies[0].text


@pytest.mark.parametrize(
    ("loss", "part", "said"),
    [
        (plain, Scores(), (Cause.LITERAL_OVERFLOW, "aten.masked_fill.Scalar", "part", "forward")),
        (filled, None, (Cause.LITERAL_OVERFLOW, "aten.full_like.default", "", "forward")),
        (mixed, None, (Cause.EXCEPTION, "aten.matmul.default", "", "forward")),
        (refused_in_backward, None, (Cause.LITERAL_OVERFLOW, "aten.masked_fill.Scalar", "", "backward")),
    ],
)
def test_the_call_that_raised_is_told(
    loss: Loss, part: nn.Module | None, said: tuple[Cause, str, str, str], run_folder: Path
) -> None:
    diagnosis = trained(run_folder, loss, part=part)
    told = diagnosis.primary
    assert isinstance(told, Incident), diagnosis.summary
    assert (diagnosis.verdict, told.step) == (Verdict.PROBLEM, LAST)
    assert (told.cause, told.op, told.module, told.phase) == said
    assert told.source is not None
    assert told.source.file.endswith("test_failed_calls.py")
    assert ("1e9 does not fit float16" in told.explanation) == (told.cause is Cause.LITERAL_OVERFLOW)
    assert told.cause is not Cause.EXCEPTION or "RuntimeError: expected" in told.explanation


def test_a_loop_that_goes_on_has_got_over_an_error(run_folder: Path) -> None:
    assert trained(run_folder, plain, part=Scores(), goes_on=True).verdict is Verdict.HEALTHY


def test_a_loop_that_stops_on_purpose_is_well(run_folder: Path) -> None:
    diagnosis = trained(run_folder, stops)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


def test_a_model_that_raises_on_purpose_is_its_own_affair(run_folder: Path) -> None:
    class Stops(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise EarlyStop

    assert trained(run_folder, plain, part=Stops()).verdict is Verdict.HEALTHY


class Stepper(torch.optim.SGD):
    """Fails in its own code, by an op or by itself."""

    fails: Callable[[], object] | None = None

    def step(self, closure: None = None) -> None:
        if self.fails is not None:
            self.fails()
        super().step(closure)


def fails(error: BaseException) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


def mismatch() -> Tensor:
    return torch.ones(3).half() + torch.ones(4)


def watched(folder: Path, *, in_loss: Callable[[], object] | None, in_step: Callable[[], object] | None) -> Diagnosis:
    """A run inside ``with`` that some code of the loop or of its optimizer leaves by an error, in its third step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = Stepper(model.parameters(), lr=1e-3)
    with contextlib.suppress(BaseException), ampscope.watch(model, dir=folder, quiet=True):
        for step in range(LAST + 1):
            optimizer.zero_grad()
            loss = plain(model(torch.randn(4, 8), raises=False))
            if step == LAST and in_loss is not None:
                in_loss()
            loss.backward()
            optimizer.fails = in_step if step == LAST else None
            optimizer.step()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(
    ("in_loss", "in_step", "said"),
    [
        (mismatch, None, ("aten.add.Tensor", "forward")),
        (None, mismatch, ("aten.add.Tensor", "optimizer")),
        (fails(ValueError("labels out of range")), None, ("", "forward")),
        (None, fails(AssertionError("the norm is not finite")), ("", "optimizer")),
        (fails(SystemExit("the loss is too large")), None, ("", "forward")),
    ],
)
def test_an_error_that_leaves_the_run_is_told_wherever_it_was_raised(
    in_loss: Callable[[], object] | None,
    in_step: Callable[[], object] | None,
    said: tuple[str, str],
    run_folder: Path,
) -> None:
    diagnosis = watched(run_folder, in_loss=in_loss, in_step=in_step)
    told = diagnosis.primary
    assert isinstance(told, Incident), diagnosis.summary
    assert (told.cause, told.step, told.op, told.phase) == (Cause.EXCEPTION, LAST, *said)
    assert told.source is not None
    assert told.source.file.endswith("test_failed_calls.py")


class _HalfMade(torch.distributions.Normal):
    def __init__(self) -> None:
        super().__init__(torch.tensor(-1.0), torch.tensor(-1.0), validate_args=True)  # others may switch it off
        self.factor = 2.0

    def __getattr__(self, name: str) -> object:
        raise ValueError(f"{name} asked of what is half made: {self.factor}")


class _Liar:
    """Answers no question about itself."""

    @property  # type: ignore[misc]  # as lazy objects and proxies have it
    def __class__(self) -> type:
        raise ValueError("asked of its class")

    @property
    def __dict__(self) -> dict[str, object]:
        raise ValueError("asked of its attributes")

    def __repr__(self) -> str:
        raise ValueError("asked to be shown")

    def fails(self) -> Tensor:
        return mismatch()

    def called_on_itself(self) -> Tensor:
        return self.fails()


class _Bound(float):
    def __float__(self) -> float:
        raise ValueError("asked for its value")


class _SilentError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("asked what it says")


def _refused_argument() -> Tensor:
    low, high = _Liar(), _Bound(1.0)
    return torch.clamp(torch.ones(3), low, high)  # type: ignore[call-overload]


def _without_a_name() -> None:
    code = compile("torch.ones(3).half() + torch.ones(4)", "generated.py", "exec")
    exec(code, {"__name__": None, "torch": torch})  # noqa: S102  # the frame is what is looked at


def _in_its_own_namespace() -> None:
    class Names:
        def __getitem__(self, name: str) -> object:
            return {"fail": mismatch}[name]

    code = compile("fail()", "generated.py", "exec")
    exec(code, {}, Names())  # type: ignore[arg-type]  # noqa: S102  # the frame is what is looked at


@pytest.mark.parametrize(
    "fail",
    [
        _HalfMade,
        _Liar().called_on_itself,
        _refused_argument,
        _without_a_name,
        _in_its_own_namespace,
        fails(_SilentError()),
    ],
)
def test_whatever_the_frames_hold_an_error_is_told(fail: Callable[[], object], run_folder: Path) -> None:
    diagnosis = watched(run_folder, in_loss=fail, in_step=None)
    told = diagnosis.primary
    assert isinstance(told, Incident), diagnosis.summary
    assert (told.cause, told.step, diagnosis.unobserved) == (Cause.EXCEPTION, LAST, ())
    assert told.source is not None


def scaled(
    folder: Path,
    *,
    after_unscaling: Callable[[], object] | None = None,
    in_step: Callable[[], object] | None = None,
    goes_on: bool = False,
) -> Diagnosis:
    """A run with a scaler of which a step fails, after its gradients are there; the program catches what it raises."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer, scaler = Stepper(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True)

    def step_of(fails: bool) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if fails and after_unscaling is not None:
            after_unscaling()
        optimizer.fails = in_step if fails else None
        scaler.step(optimizer)
        scaler.update()

    def train() -> None:
        for step in range(LAST + (3 if goes_on else 1)):
            with contextlib.suppress(RuntimeError) if goes_on else contextlib.nullcontext():
                step_of(fails=step == LAST)
            if goes_on and step == LAST:
                scaler.update()

    with contextlib.suppress(BaseException):
        train()
    scope.close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(
    ("after_unscaling", "in_step", "said"),
    [
        (mismatch, None, ("aten.add.Tensor", "forward")),
        (None, mismatch, ("aten.add.Tensor", "optimizer")),
        (None, fails(RuntimeError("shapes of state and parameter differ")), ("", "optimizer")),
    ],
)
def test_an_error_that_the_program_caught_and_made_no_step_after_is_told(
    after_unscaling: Callable[[], object] | None,
    in_step: Callable[[], object] | None,
    said: tuple[str, str],
    run_folder: Path,
) -> None:
    diagnosis = scaled(run_folder, after_unscaling=after_unscaling, in_step=in_step)
    told = diagnosis.primary
    assert isinstance(told, Incident), diagnosis.summary
    assert (told.cause, told.step, told.op, told.phase) == (Cause.EXCEPTION, LAST, *said)
    assert told.source is not None
    assert told.source.file.endswith("test_failed_calls.py")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), StopIteration(), EarlyStop()])
@pytest.mark.parametrize("place", ["after_unscaling", "in_step"])
def test_what_stops_a_program_after_the_gradients_is_no_error(
    error: BaseException, place: str, run_folder: Path
) -> None:
    at: dict[str, Any] = {place: fails(error)}
    diagnosis = scaled(run_folder, **at)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


@pytest.mark.parametrize("place", ["after_unscaling", "in_step"])
def test_a_loop_that_steps_again_has_got_over_an_error_after_the_gradients(place: str, run_folder: Path) -> None:
    at: dict[str, Any] = {place: mismatch}
    diagnosis = scaled(run_folder, **at, goes_on=True)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), StopIteration(), EarlyStop()])
def test_what_a_run_is_stopped_by_is_no_error(error: BaseException, run_folder: Path) -> None:
    diagnosis = watched(run_folder, in_loss=fails(error), in_step=None)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


def test_an_error_that_the_loop_caught_after_its_last_step_is_none_of_the_run(run_folder: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for _ in range(LAST):
            plain(model(torch.randn(4, 8), raises=False)).backward()
            optimizer.step()
        with contextlib.suppress(RuntimeError):
            model(torch.randn(4, 9), raises=False)
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY


def test_a_second_run_within_the_handling_of_an_error_is_not_ended_by_it(run_folder: Path) -> None:
    try:
        mismatch()
    except RuntimeError:
        assert trained(run_folder, plain).verdict is Verdict.HEALTHY


def test_gradients_that_the_loop_itself_gave_the_run_up_for_are_told(run_folder: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with contextlib.suppress(AssertionError), ampscope.watch(model, dir=run_folder, quiet=True):
        for step in range(LAST + 1):
            optimizer.zero_grad()
            x = model(torch.randn(4, 8), raises=False)
            (x - x if step == LAST else x + 9.0).abs().sqrt().mean().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            optimizer.step()
    told = ampscope.diagnose(run_folder).primary
    assert isinstance(told, Incident)
    assert (told.cause, told.step) == (Cause.SQRT_GRAD_ZERO, LAST)


def left_at_bad_gradients(
    folder: Path, *, scaler: torch.amp.GradScaler | None, tells_scaler: bool = False, unscales: bool = True
) -> Diagnosis:
    """A loop that looks at its gradients after its third backward, and ends without a word."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True)
    for step in range(LAST + 1):
        optimizer.zero_grad()
        x = model(torch.randn(4, 8))
        loss = (x - x if step == LAST else x + 9.0).abs().sqrt().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler and (unscales or step < LAST):
            scaler.unscale_(optimizer)
        if step == LAST:
            break
        (scaler.step if scaler else lambda each: each.step())(optimizer)
        if scaler:
            scaler.update()
    if scaler and tells_scaler:
        scaler.update()
    scope.close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("with_scaler", [True, False])
def test_bad_gradients_that_a_loop_ends_at_are_told(with_scaler: bool, run_folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if with_scaler else None
    told = left_at_bad_gradients(run_folder, scaler=scaler).primary
    assert isinstance(told, Incident)
    assert (told.cause, told.step) == (Cause.SQRT_GRAD_ZERO, LAST)


@pytest.mark.parametrize("asked", [{"tells_scaler": True}, {"unscales": False}])
def test_gradients_that_the_scaler_skips_or_scales_are_no_reason_to_end(
    asked: dict[str, bool], run_folder: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert left_at_bad_gradients(run_folder, scaler=scaler, **asked).incidents == ()


def left_by(folder: Path, error: str, *, bad: bool, masked: bool = False) -> Incident:
    """A run inside ``with`` that an error ends before its third step has a loss."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with contextlib.suppress(ValueError), ampscope.watch(model, dir=folder, quiet=True):
        for step in range(LAST + 1):
            optimizer.zero_grad()
            out = model(torch.randn(4, 8))
            scores = torch.log(out * 0.0) if bad and step == LAST else out
            scores = scores.masked_fill(scores > 0, -torch.inf) if masked else scores
            if step == LAST:
                raise ValueError(error)
            scores.softmax(-1).square().mean().backward()
            optimizer.step()
    told = ampscope.diagnose(folder).primary
    assert isinstance(told, Incident)
    return told


def test_the_origin_of_the_values_that_an_error_speaks_of_is_told_with_it(run_folder: Path) -> None:
    told = left_by(run_folder, "the scores hold inf", bad=True)
    assert (told.cause, told.op, told.step, told.replay) == (Cause.LOG_ZERO, "aten.log.default", LAST, "exact")
    assert told.explanation.endswith("The error that it led to: ValueError: the scores hold inf.")


@pytest.mark.parametrize(
    ("error", "bad", "masked"),
    [("labels are out of range", True, False), ("the labels hold NaN", False, False), ("NaN in labels", False, True)],
)
def test_values_have_no_part_in_an_error_unless_it_speaks_of_them_and_they_are_bad(
    error: str, bad: bool, masked: bool, run_folder: Path
) -> None:
    told = left_by(run_folder, error, bad=bad, masked=masked)
    assert (told.cause, told.step) == (Cause.EXCEPTION, LAST)
    assert error in told.explanation
