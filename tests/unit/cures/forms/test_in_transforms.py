"""Forms of calls inside transforms of torch.func: tried as anywhere, with good values compared as anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.torch_support import transforms
from ampscope.capture.torch_support.user_line import Place
from ampscope.cures.call_form import CallForm, CallPlace
from ampscope.cures.forms.bounds import AddedEps, OperandBound
from ampscope.cures.forms.exponentials import MaxOff
from ampscope.trace.schema import Form
from tests.support.primary import primary_incident

LOG = frozenset({"log"})


class Evidence(nn.Module):
    """The logarithm of what is zero for one row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.inner(x)) * x.abs().amax())


def test_a_bound_is_tried_inside_vmap(run_folder: Path) -> None:
    torch.manual_seed(0)
    model = Evidence()
    nn.init.ones_(model.inner.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for step in range(2):
            optimizer.zero_grad()
            x = torch.rand(6, 4)
            x[2] *= float(step == 0)
            torch.vmap(model)(x).mean().backward()
            optimizer.step()
    first = primary_incident(ampscope.open_run(run_folder)).remedies[0]
    assert (first.kind, first.verified, first.changes_good_values) == (Form.OPERAND_BOUND, True, False)


FORMS: dict[str, tuple[CallForm, Callable[[Tensor], Tensor]]] = {
    "nothing changes": (OperandBound(LOG, 0, 1e-3, lowest=True), torch.log),
    "all change": (AddedEps(LOG, argument=0, value=0.5), torch.log),
    "of a softmax": (MaxOff((0,)), lambda row: row.exp() / row.exp().sum()),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("out", [0, 1])
def test_good_values_are_compared_as_they_are_outside(name: str, out: int) -> None:
    x = 1.0 + torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    form, program = FORMS[name]

    def changed(run: Callable[[], Tensor]) -> float | None:
        here = Place(changed.__code__, 1)
        change = OtherForm(form, CallPlace(here.file, 1))
        with change.active(lambda: here):
            run()
        return change.used.good_change if change.used is not None else None

    mapped = changed(lambda: torch.vmap(program, in_dims=out, out_dims=out)(x.t() if out else x))
    rows = [changed(lambda row=row: program(row)) or 0.0 for row in x]  # type: ignore[misc]
    assert mapped is not None
    if name == "of a softmax":  # by the row that moves most
        assert 0 < mapped <= max(rows) < 1
    else:
        assert mapped == pytest.approx(max(rows))


def test_the_whole_batch_of_nested_transforms_has_every_row_once() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    seen: list[Tensor] = []

    def note(row: Tensor) -> Tensor:
        seen.append(transforms.whole_batch(row))
        return (row * 2).sum()

    torch.vmap(torch.vmap(note, in_dims=1), in_dims=0)(x)  # the inner one maps over the last dimension
    torch.func.grad(note)(x[0, 0])
    nested, differentiated = seen
    assert sorted(nested.shape) == [2, 3, 4]
    assert torch.equal(nested.sort(-1).values.flatten().sort().values, torch.arange(24.0))
    assert nested.shape[-1] == 3, "what one call sees comes last"
    assert torch.equal(differentiated, x[0, 0])
