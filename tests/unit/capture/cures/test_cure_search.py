"""Counterfactual replays: what is tried on a bad step, in which order, and that it says the truth about the cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.budgets import ALWAYS_REPLAYED, FREE_REPLAY_SECONDS, ReplayBudget
from ampscope.capture.changes.failure import Failure, OpKey
from ampscope.capture.changes.replay_change import EverythingIn, ModulesInFloat32, OtherLossScale, ReplayChange
from ampscope.capture.cures import trial_plan as plans
from ampscope.capture.cures.trial_plan import TrialFeedback
from ampscope.capture.isolation import memory
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace import schema
from ampscope.trace.schema import LOSS_CODE, ReplayRow, Table, Trial
from tests.support.primary import primary_incident
from tests.support.training.small_loop import Model, here
from tests.support.training.twin_runs import Loop, Watched, train_both

LARGE = 1000.0  #: its square is past 65504
NO_ROWS = TracedRows([], [], Sites(0, str))


class Scores(nn.Module):
    """The product of large queries and keys overflows float16; the next linear reads what it would be in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x @ x.transpose(-1, -2))


class Net(nn.Module):
    """Overflows in ``scores`` where its gain is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scores = Scores()
        self.head = nn.Linear(8, 1)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scores(torch.tanh(self.inner(x)) * self.gain)) / self.gain**2


def loop(
    model: Model,
    loss_of: Callable[[Model, Tensor, int], Tensor],
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float16,
    init_scale: float = 4.0,
) -> Loop:
    """A training loop whose ``loss_of`` gets the model, a batch and the number of the step."""

    def run(watch: Callable[..., Any]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(here(), init_scale=init_scale)
        watch(model, scaler)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast(here(), dtype=dtype):
                loss = loss_of(model, torch.randn(2, 8, 8), step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "losses": losses}

    return run


def fresh(make: Callable[[], Model], loss_of: Callable[[Model, Tensor, int], Tensor], **options: Any) -> Loop:
    """The same with a model made anew each time it is run."""

    def run(watch: Callable[..., Any]) -> Any:
        return loop(make(), loss_of, **options)(watch)

    return run


def overflow_at(bad: int | None) -> Callable[[Any, Tensor, int], Tensor]:
    """For a model that has a gain."""

    def loss_of(model: Any, x: Tensor, step: int) -> Tensor:
        model.gain = LARGE if bad is None or step == bad else 1.0
        return model(x).float().square().mean()

    return loss_of


def tried(watched: Watched) -> list[ReplayRow]:
    return watched.run.rows(Table.REPLAYS)


def in_short(rows: list[ReplayRow]) -> list[tuple[str, tuple[str, ...], str]]:
    return [(row.change, tuple(row.modules), row.outcome) for row in rows]


@pytest.mark.usefixtures("device")
def test_the_cure_of_an_overflow_is_found_and_training_is_the_same(run_folder: Path) -> None:
    watched = train_both(fresh(Net, overflow_at(1)), run_folder)
    assert in_short(tried(watched)) == [
        ("fp32", (), "finite"),
        ("modules_fp32", ("scores",), "nonfinite"),
        ("modules_fp32", ("scores", "head"), "finite"),
    ]
    assert {row.source for row in watched.run.rows(Table.OPS, step=1)} >= {"replay", "replay:fp32"}
    dtypes = {row.site: row.out_dtypes for row in watched.run.rows(Table.SITES)}
    in_fp32 = watched.run.rows(Table.OPS, step=1, source="replay:fp32")
    assert not any("float16" in dtypes[row.site] for row in in_fp32)
    fp32 = tried(watched)[0]
    assert fp32.op_min is not None
    assert fp32.op_max is not None
    assert 65504 < max(abs(fp32.op_min), fp32.op_max) < 8 * LARGE**2
    assert watched.warnings == []


@pytest.mark.usefixtures("device")
def test_the_remedy_that_is_called_verified_keeps_the_loop_from_failing(run_folder: Path) -> None:
    def bad(model: nn.Module) -> Watched:
        return Watched.train(loop(model, overflow_at(1)), run_folder)

    failing = bad(Net())
    assert failing.steps[1].skipped
    primary = primary_incident(failing.run)
    (remedy,) = (each for each in primary.remedies if each.verified and "keep_fp32" in each.code)
    cured = Net()
    exec(remedy.code, {"ampscope": ampscope, "model": cured})  # noqa: S102  # as a reader of the diagnosis would paste it
    run_folder.rename(run_folder.with_name("failing"))
    assert bad(cured).incidents == []


class Averaged(Net):
    """Keeps an average that overflows beside what the loss shows."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Average()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.average(x, self.gain))


class Average(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor, gain: float) -> Tensor:
        with torch.no_grad():
            self.mean += ((x * gain) @ (x * gain).transpose(-1, -2)).mean()
        return x


@pytest.mark.usefixtures("device")
def test_what_leaves_a_buffer_bad_has_not_cured_the_step(run_folder: Path) -> None:
    watched = Watched.train(fresh(Averaged, overflow_at(1)), run_folder)
    cured = [row.modules for row in tried(watched) if row.change == "modules_fp32" and row.outcome == "finite"]
    assert all("average" in modules for modules in cured)
    assert ("fp32", (), "finite") in in_short(tried(watched))
    assert cured


@pytest.mark.usefixtures("device")
def test_what_fails_in_float32_too_is_not_blamed_on_precision(run_folder: Path) -> None:
    def zero(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return torch.log(model(x).relu() * 0.0 + (step != 1)).mean()

    watched = train_both(fresh(Net, zero), run_folder)
    assert in_short(tried(watched))[:1] == [("fp32", (), "nonfinite")]
    assert primary_incident(watched.run).fp32_ok is False


@pytest.mark.usefixtures("device")
def test_the_largest_scale_is_the_largest(run_folder: Path) -> None:
    def steep(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return (model(x).float() * 5).square().sum()

    def first_step_skipped(scale: float) -> bool:
        torch.manual_seed(1)
        scaler_loop = loop(nn.Linear(8, 8), steep, steps=1, init_scale=scale)
        folder = run_folder.with_name(f"at{scale:g}")
        return Watched.train(scaler_loop, folder, replay_budget=0).steps[0].skipped

    torch.manual_seed(1)
    watched = Watched.train(loop(nn.Linear(8, 8), steep, steps=1, init_scale=2.0**16), run_folder)
    rows = tried(watched)
    assert [(row.change, row.outcome) for row in rows] == [("fp32", "finite"), ("scale", "finite"), ("scale", "finite")]
    assert rows[1].scale == 1.0
    assert [row.loss for row in rows] == pytest.approx([watched.steps[0].loss] * 3, rel=0.01)  # none of them scaled
    best = rows[2].scale
    assert best is not None
    assert not first_step_skipped(best)
    assert first_step_skipped(2 * best)


@pytest.mark.usefixtures("device")
def test_a_failure_that_comes_again_goes_on_where_the_last_stopped(run_folder: Path) -> None:
    watched = Watched.train(loop(Net(), overflow_at(None), steps=6), run_folder, replay_budget=1)
    rows = tried(watched)
    assert [row.step for row in rows] == [0, 1, 1, 2, 3, 4], "a module that moved the failure is widened at once"
    both = ("modules_fp32", ("scores", "head"), "finite")
    assert in_short(rows)[2:] == [both, ("bf16", (), "finite"), both, both]
    incident = primary_incident(watched.run)
    assert (incident.step, incident.last_step, incident.count) == (0, 5, 6)
    assert [each.change for each in incident.tried] == ["fp32", *["modules_fp32"] * 2, "bf16", *["modules_fp32"] * 2]


def test_modules_that_cure_together_come_before_everything_when_the_step_fails_once(run_folder: Path) -> None:
    watched = Watched.train(loop(Net(), overflow_at(1)), run_folder, replay_budget=2)
    assert in_short(tried(watched))[1:] == [
        ("modules_fp32", ("scores",), "nonfinite"),
        ("modules_fp32", ("scores", "head"), "finite"),
    ]
    assert primary_incident(watched.run).remedies[0].text == "Keep scores and head in float32."


@pytest.mark.usefixtures("device")
def test_no_budget_no_trials(run_folder: Path) -> None:
    watched = Watched.train(loop(Net(), overflow_at(1)), run_folder, replay_budget=0)
    assert (watched.replay_of(1)[0], tried(watched)) == ("exact", [])
    assert primary_incident(watched.run).fp32_ok is None


def test_no_memory_no_trials_and_it_is_said(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory, "fits", lambda needed, device: asked.append((needed, device.type)))
    watched = Watched.train(loop(Net(), overflow_at(1)), run_folder)
    assert watched.replay_of(1)[0] == "exact"
    assert in_short(tried(watched)) == [("fp32", (), "unavailable")]
    assert "memory" in tried(watched)[0].reason
    ((needed, device),) = asked
    assert device == "cpu"
    assert 4 * 2 * 8 * 8 < needed < 1 << 20


@pytest.mark.usefixtures("device")
def test_memory_that_is_there_and_that_is_not() -> None:
    assert memory.fits(1, torch.device("cpu"))
    assert not memory.fits(1 << 60, torch.device("cpu"))
    assert memory.fits(1 << 60, torch.device("meta"))  # where nobody can tell, trying decides


class ByHand(nn.Module):
    """Converts by itself, has a region of its own, and is recomputed in backward."""

    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.weight * x * LARGE).float() / LARGE**2


def _own_region(x: Tensor) -> Tensor:
    with torch.autocast(here(), dtype=torch.float16):
        return x.unsqueeze(-1) @ x.unsqueeze(-2)


def _recomputed(x: Tensor) -> Tensor:
    return checkpoint(_own_region, x, use_reentrant=False)


def _recomputed_reentrant(x: Tensor) -> Tensor:
    return checkpoint(_own_region, x, use_reentrant=True)


SQUARES = {
    "half()": lambda x: x.half().square(),
    "to(dtype)": lambda x: x.to(torch.float16).square(),
    "to(dtype=)": lambda x: x.to(dtype=torch.float16).square(),
    "type_as": lambda x: x.type_as(torch.ones((), dtype=torch.float16)).square(),
    "its own region": _own_region,
    "recomputed": _recomputed,
    "recomputed, reentrant": _recomputed_reentrant,
}


@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES.keys())
def test_float32_means_float32_however_half_was_asked_for(run_folder: Path, square: Callable[[Tensor], Tensor]) -> None:
    def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return model(x).mean()

    watched = train_both(fresh(lambda: ByHand(square), loss_of, steps=1), run_folder)
    outcomes = {row.change: row.outcome for row in tried(watched)}
    assert outcomes["fp32"] == Trial.FINITE
    assert watched.warnings == []


@pytest.mark.usefixtures("device")
def test_half_parameters_and_inputs_are_widened(run_folder: Path) -> None:
    def run(watch: Callable[..., Any]) -> Any:
        model = nn.Linear(8, 8).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        watch(model)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.full((2, 8), LARGE, dtype=torch.float16)) * LARGE).square().mean().float().backward()
            optimizer.step()
        return {"model": model}

    watched = train_both(run, run_folder)
    assert in_short(tried(watched))[0] == ("fp32", (), "finite")


def test_the_loss_code_is_told_from_the_model(run_folder: Path) -> None:
    def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return (model(x) * 0 + LARGE).square().mean().float()

    torch.manual_seed(0)
    watched = Watched.train(loop(nn.Linear(8, 8), loss_of, steps=1), run_folder)
    rows = tried(watched)
    assert in_short(rows)[1:] == [("form", (), "finite"), ("modules_fp32", (LOSS_CODE,), "finite")]
    assert (rows[1].form, rows[1].form_call) == ("in_float32", "square")
    (incident,) = (each for each in ampscope.diagnose(watched.run).incidents if each.tried)
    assert [remedy.text for remedy in incident.remedies if remedy.verified] == [
        "Compute square in float32, outside of autocast.",
        "Keep the loss code in float32.",
    ]


class Rates(nn.Module):
    """Converts to half precision by itself, beyond what autocast decides."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        return self.convert(self.inner(x) * 0 + 12.0).exp().float()


CONVERTS = {
    "from float32": lambda y: y.float().half(),
    "dtype": lambda y: y.float().to(torch.float16),
    "what is half already": lambda y: y.half(),
}


def rates_loss(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x).mean() * 1e-6


def rates_in_loss(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x) * 0 + 12.0).half().exp().float().mean() * 1e-6


@pytest.mark.parametrize("convert", CONVERTS.values(), ids=CONVERTS.keys())
def test_a_conversion_in_the_code_is_cured_where_it_stands(run_folder: Path, convert: Any) -> None:
    watched = train_both(fresh(lambda: Rates(convert), rates_loss, steps=1), run_folder)
    assert in_short(tried(watched)) == [("fp32", (), "finite"), ("conversions", (), "finite")]
    here, number = Path(__file__).name, convert.__code__.co_firstlineno
    assert [row.conversion_lines for row in tried(watched)] == [(number,), (number,)]
    assert all(Path(file).name == here for row in tried(watched) for file in row.conversion_files or ())
    line = f"{here}:{number} "
    incident = primary_incident(watched.run)
    assert line.strip() in incident.explanation
    first, *others = incident.remedies
    assert (first.verified, line.strip() in first.text) == (True, True)
    told = first.code + (first.diff or "")
    assert "float32" in told or ".float()" in told
    assert not any(remedy.verified for remedy in others)
    assert not any("autocast" in remedy.code for remedy in incident.remedies)


def test_a_conversion_in_the_loss_code_is_too(run_folder: Path) -> None:
    watched = train_both(fresh(lambda: nn.Linear(8, 8), rates_in_loss, steps=1), run_folder)
    assert in_short(tried(watched)) == [("fp32", (), "finite"), ("conversions", (), "finite")]
    assert ".half()" in primary_incident(watched.run).remedies[0].code.replace(".float().exp()", ".half()")


def test_a_conversion_and_what_autocast_does_after_it_are_cured_together(run_folder: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Rates(CONVERTS["from float32"]), nn.Linear(8, 1))

    def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return model(x).float().mean() * 1e-9

    watched = Watched.train(fresh(make, loss_of, steps=1), run_folder)
    rows = in_short(tried(watched))
    assert rows[:3] == [("fp32", (), "finite"), ("conversions", (), "nonfinite"), ("modules_fp32", ("1",), "finite")]
    (incident,) = (each for each in ampscope.diagnose(watched.run).incidents if each.tried)
    (remedy,) = (each for each in incident.remedies if each.verified)
    assert remedy.text.startswith("Take out the conversion to half precision at ")
    assert remedy.text.endswith("and keep 1 in float32.")


@pytest.mark.usefixtures("device")
def test_a_conversion_that_has_no_part_in_the_failure_is_left_alone(run_folder: Path) -> None:
    def loss_of(model: Net, x: Tensor, step: int) -> Tensor:
        model.gain = LARGE
        out = model(x).float()
        return out.square().mean() + out.detach().sigmoid().half().float().mean()

    watched = Watched.train(fresh(Net, loss_of, steps=1), run_folder)
    assert [row[:2] for row in in_short(tried(watched))][1:3] == [("conversions", ()), ("modules_fp32", ("scores",))]
    assert not tried(watched)[2].conversion_files
    assert "converts" not in primary_incident(watched.run).explanation


def test_a_conversion_to_the_dtype_of_another_tensor_follows_autocast(run_folder: Path) -> None:
    def follow_it(y: Tensor) -> Tensor:
        return (y.float() * 1.0).to(y.dtype)

    watched = Watched.train(fresh(lambda: Rates(follow_it), rates_loss, steps=1), run_folder)
    assert "conversions" not in [row.change for row in tried(watched)]
    assert "converts" not in primary_incident(watched.run).explanation


class Gains(nn.Module):
    """A frozen half-precision weight that an element-wise product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 300.0, dtype=torch.float16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.inner(x) * 0 + 300.0) * self.gain).float()


@pytest.mark.usefixtures("device")
def test_a_remedy_for_what_is_half_itself_reaches_it(run_folder: Path) -> None:
    def bad(model: nn.Module) -> Watched:
        return Watched.train(loop(model, rates_loss, steps=1), run_folder)

    incident = primary_incident(bad(Gains()).run)
    assert "because of gain" in incident.explanation
    helped = [each for each in incident.remedies if each.verified and each.kind != "in_float32"]
    assert helped
    assert all("gain" in each.text for each in helped)
    (remedy,) = (each for each in helped if "leave autocast out" in each.text)
    assert remedy.code.startswith("model.float()")


@pytest.mark.usefixtures("device")
def test_bfloat16_alone_is_compared_with_float32(run_folder: Path) -> None:
    def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return torch.log(1 - torch.sigmoid(model(x) * 0 + 7.0)).mean()  # 0.999 rounds to 1 in bfloat16

    watched = Watched.train(loop(nn.Linear(8, 8), loss_of, steps=1, dtype=torch.bfloat16), run_folder)
    changes = [row.change for row in tried(watched)]
    assert in_short(tried(watched))[0] == ("fp32", (), "finite")
    assert "bf16" not in changes


def test_nothing_of_torch_stays_replaced(run_folder: Path) -> None:
    before = torch.set_autocast_enabled, torch.set_autocast_dtype
    states: list[tuple[bool, torch.dtype]] = []

    class Scaler(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            super().update(new_scale)

    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), Scaler("cpu", init_scale=4.0)
    with ampscope.watch(model, scaler, dir=run_folder, quiet=True), torch.autocast(here(), dtype=torch.float16):
        scaler.scale(overflow_at(0)(model, torch.randn(2, 8, 8), 0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert states == [(True, torch.float16)]
    assert (torch.set_autocast_enabled, torch.set_autocast_dtype) == before
    assert len(ampscope.open_run(run_folder).rows(Table.REPLAYS)) == 3


@pytest.mark.usefixtures("device")
def test_a_change_that_cannot_be_made_says_why(run_folder: Path) -> None:
    def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = model(x) * LARGE
        if out.dtype is not torch.float16:
            raise TypeError("only half precision is served here")
        return out.square().mean()

    class Insists(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return loss_of(super().forward, x)

    torch.manual_seed(0)
    watched = Watched.train(loop(Insists(8, 8), lambda model, x, _: model(x + LARGE), steps=1), run_folder)
    first = tried(watched)[0]
    assert (first.change, first.outcome) == ("fp32", "unavailable")
    assert "only half precision is served here" in first.reason
    assert watched.warnings == []


# -- the plan ---------------------------------------------------------------------------------------------------------


def failure(*, modules: tuple[str, ...] = ("a", "b"), dtypes: str = "float16", by_scale: bool = False) -> Failure:
    op = OpKey("aten.mm.default", modules[0], "forward", "train.py", 3, "")
    return Failure(op, 0, modules, frozenset(dtypes.split()), by_scale)


def follow(located: Failure, scale: float | None, answers: Iterator[Any]) -> list[tuple[Any, ...]]:
    """What a plan tries when it is told ``answers``."""
    plan = plans.plan(located, scale, NO_ROWS)
    asked: list[tuple[Any, ...]] = []
    learned: Any = None
    while True:
        try:
            change: ReplayChange = plan.send(learned)
        except StopIteration:
            return asked
        asked.append((change.kind.value, *change.modules, *([change.scale] if change.scale else [])))
        learned = next(answers)


def shown(outcome: Trial, *modules: str, headroom: float | None = None) -> TrialFeedback:
    return TrialFeedback(outcome, failure(modules=modules) if modules else None, headroom)


FINITE, NOT = Trial.FINITE, Trial.NONFINITE


@pytest.mark.usefixtures("device")
def test_precision_without_a_part_in_it_ends_the_plan() -> None:
    assert follow(failure(), 4.0, iter([shown(NOT)])) == [("fp32",)]
    assert follow(failure(dtypes=""), 4.0, iter([])) == []


@pytest.mark.usefixtures("device")
def test_the_modules_grow_by_those_in_which_it_fails_next() -> None:
    answers = iter([shown(FINITE), shown(NOT, "a", "c"), shown(NOT, "d"), shown(FINITE), shown(FINITE)])
    assert follow(failure(), None, answers) == [
        ("fp32",),
        ("modules_fp32", "a"),
        ("modules_fp32", "a", "c"),
        ("modules_fp32", "a", "c", "d"),
        ("bf16",),
    ]


@pytest.mark.usefixtures("device")
def test_the_search_ends_where_nothing_new_fails_or_too_much_does() -> None:
    nothing_new = iter([shown(FINITE), shown(NOT, "a"), shown(NOT)])
    assert follow(failure(dtypes="bfloat16"), None, nothing_new) == [("fp32",), ("modules_fp32", "a")]
    without_end = (shown(FINITE) if number == 0 else shown(NOT, f"m{number}") for number in range(100))
    asked = follow(failure(dtypes="bfloat16"), None, without_end)
    assert len(asked) == 1 + plans.MOST_MODULES


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("scale", "low", "expected"),
    [
        (2.0**16, shown(FINITE, headroom=1000.0), [("scale", 1.0), ("scale", 512.0)]),
        (2.0**16, shown(FINITE, headroom=1.5), [("scale", 1.0)]),
        (2.0**16, shown(NOT), [("scale", 1.0)]),
        (256.0, shown(FINITE, headroom=1e6), [("scale", 1.0)]),
        (1.0, None, []),
    ],
    ids=["room", "no room", "not even at 1", "room above it", "already at 1"],
)
def test_the_scales(scale: float, low: Any, expected: list[Any]) -> None:
    answers = iter([shown(FINITE), *([low] if low else []), *[shown(FINITE)] * 3])
    asked = follow(failure(by_scale=True), scale, answers)
    assert [change for change in asked if change[0] == "scale"] == expected


@pytest.mark.usefixtures("device")
def test_changes_say_what_they_are() -> None:
    assert ReplayChange().kind is schema.Change.NONE
    assert EverythingIn(torch.float32).kind is schema.Change.FP32
    assert EverythingIn(torch.bfloat16).kind is schema.Change.BF16
    assert ModulesInFloat32(("a",)).modules == ("a",)
    assert OtherLossScale(2.0).scale == 2.0
    half = torch.ones(2, dtype=torch.bfloat16)
    assert EverythingIn(torch.bfloat16).leaf(half) is half
    assert EverythingIn(torch.float32).leaf(half).dtype is torch.float32


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
def test_the_first_incidents_are_always_replayed_and_later_ones_within_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("ampscope.capture.budgets.time.perf_counter", lambda: now)
    budget = ReplayBudget(0.01, 2)
    for step in range(ALWAYS_REPLAYED):
        assert budget.allows("overflow", step)
        assert budget.allows_trial(1)
        assert not budget.allows_trial(2)
        budget.spent(FREE_REPLAY_SECONDS)
    assert not budget.allows("overflow", 3)
    now = 100 * (ALWAYS_REPLAYED + 1) * FREE_REPLAY_SECONDS + 1
    assert budget.allows("overflow", 4)
    assert budget.allows_trial(0)
    budget.spent(math.inf)
    assert not budget.allows("overflow", 5)
