"""Forms of a call that is well in float32: which is tried, and that it is what a person would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.words import in_words
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Form, ReplayRow, Table
from tests.support.primary import primary_incident

#: A computation on what a layer gives in float16.
Part = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, and a part that may not survive half precision."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.inner(x))


def _loss(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.float16):
        return model(torch.randn(4, 8)).float().mean()


def tried(run: Path, part: Part, *, scale: float = 1.0, trials: int = 3) -> list[ReplayRow]:
    """What was tried on one step of float16 autocast."""
    torch.manual_seed(0)
    model = Net(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with ampscope.watch(model, scaler, dir=run, replay_budget=trials):
        scaler.scale(_loss(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(open_run(run).rows(Table.REPLAYS))


def by_hand(part: Part) -> float:
    """The loss of the same step where a person has written the part otherwise."""
    torch.manual_seed(0)
    return _loss(Net(part)).item()


class Case(NamedTuple):
    """A part that fails in float16, and how it is cured."""

    part: Part
    form: Form
    call: str
    value: float | None
    was: float | None
    cured: Part
    changes_good_values: bool = False


def _product(h: Tensor) -> tuple[Tensor, Tensor]:
    return (h + 300).unsqueeze(1), (h + 300).unsqueeze(2)


CASES = {
    "an eps in a root": Case(
        lambda h: ((h * 0).square() + 1e-8).sqrt(),
        *(Form.CONSTANT, "add", 1e-4, 1e-8),
        lambda h: ((h * 0).square() + 1e-4).sqrt(),
        changes_good_values=True,  # the root itself is finite at zero, and another one now
    ),
    "an eps in a quotient": Case(
        lambda h: h * 0 / ((h * 0).abs() + 1e-8),
        *(Form.CONSTANT, "add", 1e-4, 1e-8),
        lambda h: h * 0 / ((h * 0).abs() + 1e-4),
    ),
    "an eps by default": Case(
        lambda h: F.normalize(h * 0, dim=-1),
        *(Form.CONSTANT, "normalize", 1e-4, 1e-12),
        lambda h: F.normalize(h * 0, dim=-1, eps=1e-4),
    ),
    "an eps by default of a function without signature": Case(
        lambda h: F.cosine_similarity(h * 0, h * 0, dim=-1),
        *(Form.CONSTANT, "cosine_similarity", 1e-4, 1e-8),
        lambda h: F.cosine_similarity(h * 0, h * 0, dim=-1, eps=1e-4),
    ),
    "an eps in place": Case(
        lambda h: h * 0 / (h * 0).add_(1e-8),
        *(Form.CONSTANT, "add_", 1e-4, 1e-8),
        lambda h: h * 0 / (h * 0).add_(1e-4),
    ),
    "a bound next to one": Case(
        lambda h: torch.log(1 - (h * 0 + 1).clamp(max=1 - 1e-7)),
        *(Form.CONSTANT, "clamp", 1 - 2.0**-10, 1 - 1e-7),
        lambda h: torch.log(1 - (h * 0 + 1).clamp(max=1 - 2.0**-10)),
    ),
    "a bound that small values feel": Case(
        lambda h: torch.log(torch.linspace(0, 1e-5, 8, dtype=h.dtype).add(h * 0).clamp(min=1e-8)),
        *(Form.CONSTANT, "clamp", 1e-4, 1e-8),
        lambda h: torch.log(torch.linspace(0, 1e-5, 8, dtype=h.dtype).add(h * 0).clamp(min=1e-4)),
        changes_good_values=True,
    ),
    "a mask": Case(
        lambda h: h + (h > 0).type_as(h) * -1e9,
        *(Form.CONSTANT, "mul", -1e4, -1e9),
        lambda h: h + (h > 0).type_as(h) * -1e4,
    ),
    "a product that is scaled after": Case(
        lambda h: torch.matmul(*_product(h)) / 64,
        *(Form.SCALE_FIRST, "matmul", 1 / 64, None),
        lambda h: torch.matmul(_product(h)[0] / 64, _product(h)[1]),
    ),
    "a product, as an operator": Case(
        lambda h: 0.0625 * (_product(h)[0] @ _product(h)[1]),
        *(Form.SCALE_FIRST, "matmul", 0.0625, None),
        lambda h: (0.0625 * _product(h)[0]) @ _product(h)[1],
    ),
    "a square": Case(
        lambda h: (h * 0 + 300).square().mean(-1),
        *(Form.IN_FLOAT32, "square", None, None),
        lambda h: (h * 0 + 300).float().square().mean(-1),
    ),
    "a variance whose squares are beyond it": Case(
        lambda h: (x := h * 4 + 300).pow(2).mean(-1) - x.mean(-1).pow(2),
        *(Form.CENTRED, "sub", None, None),
        lambda h: ((x := h * 4 + 300) - x.mean(-1, keepdim=True)).square().mean(-1),
    ),
    "a sum": Case(
        lambda h: (h * 0 + 30000).sum(-1),
        *(Form.IN_FLOAT32, "sum", None, None),
        lambda h: (h * 0 + 30000).float().sum(-1),
    ),
    "a product that a sum reads": Case(
        lambda h: torch.einsum("bi,bi->b", h * 0 + 300, h * 0 + 300),
        *(Form.IN_FLOAT32, "einsum", None, None),
        lambda h: (h.float() * 0 + 300).square().sum(-1),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_failed_call_is_tried_in_the_form_that_a_person_would_write(run_folder: Path, case: Case) -> None:
    form = next(row for row in tried(run_folder, case.part) if row.form is not None)
    assert (form.form, form.form_call, form.outcome) == (case.form, case.call, "finite")
    assert (form.form_value, form.form_was) == (case.value, case.was)
    assert str(form.form_file).endswith("test_range_forms.py")
    assert form.loss == by_hand(case.cured), "what was tried is what is told, to the last bit"
    assert (form.good_change or 0.0) > 4.0 if case.changes_good_values else (form.good_change or 0.0) <= 4.0


NOT_OFFERED: dict[str, tuple[Part, Form]] = {
    "an eps that survives": (lambda h: (h * 0).log().exp() + (h * 0 + 300).square() + 1e-4, Form.CONSTANT),
    "an eps that has no part in it": (lambda h: ((h * 0 + 300).square() + 1e-8).mean(-1), Form.CONSTANT),
    "an eps of what is divided": (lambda h: (h * 0 + 1e-8) / (h * 0 + 1e-4).square().square(), Form.CONSTANT),
    "a product too large with its scale": (lambda h: torch.matmul(*_product(h)) * 0.9, Form.SCALE_FIRST),
    "a product whose result others read": (
        lambda h: (y := torch.matmul(*_product(h))) / 64 + y.float() * 0,
        Form.SCALE_FIRST,
    ),
    "a product that the next cannot read": (lambda h: (h @ h.mT * 0 + 300).square() @ h, Form.IN_FLOAT32),
    "a layer, which is a module": (
        lambda h: F.relu(h) + 60000 + 60000 * h.detach().float().half() * 0,
        Form.IN_FLOAT32,
    ),
}


@pytest.mark.parametrize(("part", "form"), NOT_OFFERED.values(), ids=NOT_OFFERED.keys())
def test_a_form_that_has_no_part_in_the_failure_is_not_tried(run_folder: Path, part: Part, form: Form) -> None:
    rows = tried(run_folder, part)
    assert [row.change for row in rows][:1] == ["fp32"]
    assert form not in [row.form for row in rows]


def test_what_then_fails_by_the_loss_scale_alone_is_tried_with_one_that_fits(run_folder: Path) -> None:
    rows = tried(run_folder, lambda h: h * 0 / ((h * 0).abs() + 1e-8), scale=2.0**16, trials=8)
    forms = [row for row in rows if row.form is not None]
    assert [(row.scale, row.outcome) for row in forms][:2] == [(2.0**16, "nonfinite"), (1.0, "finite")]
    assert rows.index(forms[1]) > [row.change for row in rows].index("modules_fp32"), "what needs no other scale first"
    remedies = [each for each in primary_incident(open_run(run_folder)).remedies if each.kind == Form.CONSTANT]
    (cured,) = [each for each in remedies if each.verified]
    largest = max(row.scale or 0.0 for row in forms[1:])
    assert f"and a loss scale of {in_words(largest)}." in cured.text
    assert [each.text.partition(",")[0] for each in remedies] == ["Give add 0.0001 instead of 1e-8"] * 2


def test_a_call_that_the_form_does_not_find_is_no_trial(run_folder: Path) -> None:
    rows = tried(run_folder, lambda h: torch.ops.aten.square.default(h * 0 + 300).mean(-1))
    assert [row.change for row in rows] == ["fp32", "modules_fp32"]
