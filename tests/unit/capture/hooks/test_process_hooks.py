"""Torch is left as it was found, and as others have made it meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.capture.hooks import process_hooks

PLACES = [(torch.autograd, "backward"), (torch, "clear_autocast_cache")]


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_a_function_that_was_taken_while_watching_works_ever_after(
    owner: Any, name: str, watch: Callable[..., ampscope.Scope]
) -> None:
    before = getattr(owner, name)
    scope = watch(nn.Linear(2, 2))
    taken = getattr(owner, name)
    scope.close()
    assert taken is not before
    assert getattr(owner, name) is before
    loss = torch.ones((), requires_grad=True) * 2
    taken(loss) if name == "backward" else taken()


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_what_others_have_put_around_it_stays(
    owner: Any, name: str, watch: Callable[..., ampscope.Scope], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    scope = watch(nn.Linear(2, 2))
    ours = getattr(owner, name)

    def theirs(*args: Any) -> None:
        calls.append(args)
        ours(*args)

    setattr(owner, name, theirs)
    scope.close()
    assert getattr(owner, name) is theirs
    watch(nn.Linear(2, 2)).close()  # and is not put around itself
    assert getattr(owner, name) is theirs
    loss = torch.ones((), requires_grad=True) * 2
    theirs(loss) if name == "backward" else theirs()
    assert len(calls) == 1
    setattr(owner, name, ours)
    watch(nn.Linear(2, 2)).close()  # theirs is gone: now the original comes back
    assert getattr(owner, name) is not ours


def test_the_end_of_an_autocast_region_runs_no_line_of_ours(watch: Callable[..., ampscope.Scope]) -> None:
    """What comes from outside would be raised in it, and the region would stay switched on."""
    frames: list[str] = []
    watch(nn.Linear(2, 2))
    before = process_hooks.epoch[0]
    with torch.autocast("cpu", dtype=torch.float16):
        sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_filename) if event == "call" else None)
    sys.setprofile(None)
    assert frames
    assert not any(Path(ampscope.__file__).parent in Path(name).parents for name in frames)
    assert process_hooks.epoch[0] == before + 1
