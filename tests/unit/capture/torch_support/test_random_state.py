"""The generators of every device that a call may draw from are kept, the current device's and others'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ampscope.capture.torch_support.call_state import RandomState, random_state_kept

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


class FakeDevices:
    """Generators of the host in the place of those of two CUDA devices."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(2)]
        self.current = 0
        self.writes: list[int] = []

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.writes.append(device.index)
        self.generators[device.index].set_state(state)

    def draw(self) -> list[list[float]]:
        return [torch.rand(3, generator=generator).tolist() for generator in self.generators]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    fake = FakeDevices()
    for name in ("is_initialized", "current_device", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_every_device_of_the_model_comes_back(cuda: FakeDevices) -> None:
    expected = cuda.draw()
    cuda.generators = [torch.Generator().manual_seed(index) for index in range(2)]
    with random_state_kept({ONE, TWO, torch.device("cpu")}):
        cuda.draw()
    assert cuda.draw() == expected


def test_the_current_device_is_always_among_them(cuda: FakeDevices) -> None:
    cuda.current = 1
    state = RandomState.take()
    assert list(state.devices) == [TWO]
    drawn = cuda.draw()[1]
    cuda.current = 0  # where it stood then is what counts
    state.put_back()
    assert cuda.draw()[1] == drawn


def test_a_generator_that_nobody_has_drawn_from_is_not_written_to(cuda: FakeDevices) -> None:
    with random_state_kept({ONE, TWO}):
        torch.rand(2, generator=cuda.generators[1])
    assert cuda.writes == [1]


def test_a_device_with_one_generator_is_asked_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Tensor] = [torch.zeros(4)]
    fake = SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append)
    monkeypatch.setattr(torch, "mps", fake)
    with random_state_kept({torch.device("mps", 0)}):
        states.append(torch.ones(4))
    assert torch.equal(states[-1], torch.zeros(4))


def test_on_the_host_alone_no_device_is_asked() -> None:
    assert RandomState.take({torch.device("cpu"), torch.device("meta")}).devices == {}
