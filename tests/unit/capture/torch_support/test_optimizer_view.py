"""What capture asks of an optimizer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ampscope.capture.torch_support.optimizer_view import OptimizerView, around_every_step, steps_running
from tests.support.paths import ROOT


def test_a_view_gives_parameters_gradients_and_rate() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [one], "lr": 0.5}, {"params": [other]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    other.grad = torch.zeros(3)
    view = OptimizerView(optimizer)
    assert [id(each) for each in view.parameters] == [id(one), id(other)]
    assert list(view.gradients) == [other.grad]
    assert view.learning_rate == 0.5


def test_steps_made_are_read_from_the_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    assert OptimizerView(optimizer).steps_made is None
    weight.grad = torch.ones(2)
    optimizer.step()
    assert OptimizerView(optimizer).steps_made == 1


class Heard(list[tuple[str, Any]]):
    """What a listener was told."""

    def before_optimizer(self, optimizer: Any, *, with_closure: bool) -> None:
        self.append(("before, with a closure" if with_closure else "before", optimizer))

    def closure(self, optimizer: Any, call: Any) -> Any:
        self.append(("closure", optimizer))
        return call()

    def after_optimizer(self, optimizer: Any) -> None:
        self.append(("after", optimizer))


def test_every_step_of_the_process_is_heard_until_the_handles_are_removed() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, heard = torch.optim.SGD([weight], lr=0.1), Heard()
    handles = around_every_step(heard)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert heard == [("before", optimizer), ("after", optimizer)]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_through_the_listener_and_returns_what_it_returned(*, by_name: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, heard = torch.optim.SGD([weight], lr=0.1), Heard()
    handles = around_every_step(heard)

    def closure() -> torch.Tensor:
        return torch.tensor(3.0)

    returned: Any = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    for handle in handles:
        handle.remove()
    assert returned == 3.0
    assert [what for what, _ in heard] == ["before, with a closure", "closure", "after"]


def test_steps_that_run_inside_each_other_are_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner, outer = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    counts: list[int] = []
    inner.register_step_pre_hook(lambda *_: counts.append(steps_running()))
    outer.register_step_pre_hook(lambda *_: counts.append(steps_running()))
    outer.register_step_post_hook(lambda *_: inner.step())
    handles = around_every_step(Heard())
    outer.step()
    for handle in handles:
        handle.remove()
    assert [*counts, steps_running()] == [1, 2, 0]


def test_nobody_else_reads_parameter_groups() -> None:
    files = [
        *(ROOT / "ampscope" / "capture").rglob("*.py"),
        *(ROOT / "ampscope" / "analysis").rglob("*.py"),
    ]
    readers = [file.name for file in files if re.search(r"\bparam_groups\b", file.read_text("utf-8"))]
    assert readers == ["optimizer_view.py", "usage_forms.py"]  # which says what a user would write
