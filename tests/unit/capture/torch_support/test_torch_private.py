"""The private names of torch: all there in the versions supported; without one, training goes on unchanged."""

from __future__ import annotations

import inspect
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.capture.torch_support import torch_private
from ampscope.trace.schema import Table
from tests.support.training.guarded_training import STEPS, training
from tests.support.training.small_loop import make_scaler
from tests.support.training.torch_state import installed
from tests.support.training.twin_runs import differences, exact_state, seed_everything

#: Of `torch_private.NAMES`, those that are torch's own functions under another name.
ASKED_AT_EACH_OP = {
    "_current_autograd_node": "current_backward_node",
    "_autograd._get_sequence_nr": "next_sequence_number",
}


def test_none_is_missing() -> None:
    """A torch that changes one is told here, by name, before anything else fails."""
    assert torch_private.missing() == []


def test_what_is_read_of_a_scaler_and_an_optimizer_is_there() -> None:
    model = nn.Linear(1, 1)
    scaler = make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    assert torch_private.steps_on_device(optimizer)
    assert not torch_private.steps_on_device(torch.optim.SGD(model.parameters(), 0.1))
    assert torch_private.scaler_initial(scaler) == {
        "init_scale": 2.0**8,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
    }
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scale_and_tracker = torch_private.scaler_tensors(scaler)
    assert [float(each) for each in scale_and_tracker if each is not None] == [2.0**8, 0.0]
    scaler.unscale_(optimizer)
    assert [float(flag) for flag in torch_private.scaler_found_inf(scaler, optimizer)] == [0.0]


def test_a_backward_node_is_known_by_its_number() -> None:
    seen = []
    number = torch_private.next_sequence_number()
    out = torch.ones(1, requires_grad=True) * 2
    out.register_hook(lambda _: seen.append(torch_private.current_backward_node()))
    assert torch_private.next_sequence_number() > number
    assert torch_private.node_sequence_number(out.grad_fn) == number
    assert torch_private.current_backward_node() is None
    out.sum().backward()
    assert seen != [None]


def test_keyword_arguments_are_where_hooks_look_for_them() -> None:
    seen = []

    class Keyword(nn.Module):
        def forward(self, *, x: Any) -> Any:
            return x

    model = Keyword()
    model.register_forward_pre_hook(lambda *_: seen.append(torch_private.forward_kwargs(inspect.stack()[1].frame)))
    model(x=1)
    assert seen == [{"x": 1}]


@pytest.mark.usefixtures("modes_removed")
@pytest.mark.parametrize("name", torch_private.NAMES)
def test_without_one_training_goes_on_unchanged(
    name: str,
    unwatched_state: dict[str, bytes],
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, scopes = installed(), []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, quiet=True))

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        patch.delattr(f"torch._C.{name}")
        if name in ASKED_AT_EACH_OP:
            patch.setattr(torch_private, ASKED_AT_EACH_OP[name], torch_private.needed(name))
        patch.setattr(torch_private, "function_stack", torch_private.ModeStack(torch_private.FUNCTION_STACK))
        patch.setattr(torch_private, "dispatch_stack", torch_private.ModeStack(torch_private.DISPATCH_STACK, None))
        seed_everything()
        state = exact_state(training(watch))
        scopes[0].close()
    assert differences(state, unwatched_state) == []
    assert installed() == before
    run = ampscope.open_run(run_folder)
    assert len(run.rows(Table.STEPS)) == STEPS
    assert any(name in row.text for row in run.rows(Table.EVENTS))


def test_a_held_storage_keeps_its_key_until_it_is_gone_and_swept() -> None:
    held, stays, goes = torch_private.HeldStorages(), torch.ones(3), torch.ones(4)
    keys = [torch_private.storage_key(each) for each in (stays, goes)]
    for key, tensor in zip(keys, (stays, goes), strict=True):
        held.hold(key, tensor)
    memory = weakref.ref(goes)
    del goes, tensor
    assert memory() is None
    assert held.sweep() == keys[1:]
    assert held.sweep() == []
    held.release()
    assert held.sweep() == []
