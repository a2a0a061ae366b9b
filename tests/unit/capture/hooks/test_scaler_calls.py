"""A scaler keeps its class and its attributes while it is watched; its calls are announced once, no others at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ampscope.capture.events import ScalerCall
from ampscope.capture.hooks import scaler_calls
from ampscope.capture.torch_support.threads import HomeThread


class Heard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        self.calls.append(call.method)
        return proceed()


class Halved(torch.amp.GradScaler):
    """Hands two of its methods on to its base, and cannot be a key."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Halved)

    def get_scale(self) -> float:
        return super().get_scale() / 2

    def update(self, new_scale: Any = None) -> None:
        super().update(self.get_scale())


@pytest.fixture
def heard() -> Iterator[Heard]:
    before = [dict(vars(kind)) for kind in (torch.amp.GradScaler, Halved)]
    yield Heard()
    assert [dict(vars(kind)) for kind in (torch.amp.GradScaler, Halved)] == before


def made(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    scaler = kind("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    return scaler


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Halved])
def test_it_stays_what_it_is(kind: type[torch.amp.GradScaler], heard: Heard) -> None:
    scaler = made(kind)
    before = dict(vars(scaler))
    scaler_calls.join(scaler, heard, HomeThread())
    assert type(scaler) is kind
    assert dict(vars(scaler)) == before
    scaler_calls.leave(scaler, heard)


def test_a_call_that_a_class_hands_on_is_announced_once(heard: Heard) -> None:
    scaler = made(Halved)
    scaler_calls.join(scaler, heard, HomeThread())
    assert scaler.get_scale() == 4.0
    scaler.update()
    scaler_calls.leave(scaler, heard)
    scaler.update()
    assert heard.calls == ["get_scale", "update", "get_scale"]


def test_another_scaler_of_its_class_is_not_heard(heard: Heard) -> None:
    scaler, other = made(Halved), made(Halved)
    scaler_calls.join(scaler, heard, HomeThread())
    assert (scaler_calls.is_watched(scaler), scaler_calls.is_watched(other)) == (True, False)
    other.get_scale()
    scaler_calls.leave(scaler, heard)
    assert heard.calls == []


def test_another_thread_is_not_heard(heard: Heard) -> None:
    scaler, home = made(torch.amp.GradScaler), HomeThread()
    assert home.is_entered()
    scaler_calls.join(scaler, heard, home)
    thread = threading.Thread(target=scaler.get_scale)
    thread.start()
    thread.join()
    scaler_calls.leave(scaler, heard)
    assert heard.calls == []


def test_what_somebody_puts_around_a_method_stays() -> None:
    scaler, heard, original = made(torch.amp.GradScaler), Heard(), torch.amp.GradScaler.get_scale
    scaler_calls.join(scaler, heard, HomeThread())
    ours = torch.amp.GradScaler.get_scale
    theirs = lambda self: ours(self) + 1  # noqa: E731
    torch.amp.GradScaler.get_scale = theirs  # type: ignore[method-assign]
    try:
        assert scaler.get_scale() == 9.0
        scaler_calls.leave(scaler, heard)
        assert torch.amp.GradScaler.get_scale is theirs
        assert scaler.get_scale() == 9.0
    finally:
        torch.amp.GradScaler.get_scale = original  # type: ignore[method-assign]
    assert heard.calls == ["get_scale"]
