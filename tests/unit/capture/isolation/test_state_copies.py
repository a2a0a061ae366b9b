"""A replay copies what forward computes with, leaves alone what drives the training, and puts everything else back."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.isolation.state_copies import PutBack, StateCopies
from ampscope.capture.torch_support.tensor_tree import plain_copy


class Loud:
    """Does not allow that its own idea of a copy is asked for."""

    def __copy__(self) -> Any:
        raise AssertionError("a copy runs the user's code")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("a copy runs the user's code")

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a copy runs the user's code")


class Cache(Loud):
    """State that forward computes with."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2)
        self.seen = 0
        self.notes: list[str] = []


class Counter(Loud):
    """State without tensors."""

    def __init__(self) -> None:
        self.calls = 0
        self.history = [1, 2]


class Trainer(Loud):
    """Reaches an optimizer, by a long way."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.loops = {"fit": [Counter()]}
        self.loops["fit"][0].optimizers = [optimizer]  # type: ignore[attr-defined]
        self.metrics = {"loss": torch.zeros(1)}


@pytest.fixture
def put_back() -> PutBack:
    return PutBack()


@pytest.fixture
def copies(put_back: PutBack) -> StateCopies:
    return StateCopies(lambda tensor: tensor.clone(), put_back)


def test_an_object_that_holds_tensors_is_copied(copies: StateCopies) -> None:
    cache = Cache()
    copied = copies.of([cache, cache])[0]
    copied.keys += 1
    copied.seen += 1
    copied.notes.append("more")
    assert type(copied) is Cache
    assert copied is copies.of(cache), "what is shared stays shared"
    assert (float(cache.keys.sum()), cache.seen, cache.notes) == (0.0, 0, [])


def test_what_reaches_an_optimizer_is_left_alone(copies: StateCopies, put_back: PutBack) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    trainer = Trainer(optimizer)
    before = dict(vars(trainer))
    assert copies.of(trainer) is trainer
    assert copies.of(optimizer) is optimizer
    put_back.all()
    assert all(vars(trainer)[name] is value for name, value in before.items())


def test_what_holds_no_tensor_is_used_and_put_back(copies: StateCopies, put_back: PutBack) -> None:
    counter: Any = Counter()
    counter.inner = Counter()
    used = copies.of(counter)
    used.calls += 1
    used.new = True
    used.inner.calls += 1
    used.inner.history.append(3)
    assert used is counter
    put_back.all()
    assert vars(counter).keys() == {"calls", "history", "inner"}
    assert (counter.calls, used.inner.calls, used.inner.history) == (0, 0, [1, 2])


def test_what_is_too_large_to_be_looked_through_is_not_copied(copies: StateCopies) -> None:
    large = Cache()
    large.bank = [[number] for number in range(10_000)]  # type: ignore[attr-defined]
    assert copies.of(large) is large


def test_what_a_replay_has_not_changed_is_not_written_to(put_back: PutBack) -> None:
    class Watched(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError("a method of the user's runs")

    unchanged, changed = Watched(a=1), Watched(a=1)
    for each in (unchanged, changed):
        put_back.keep(each)
    changed["b"] = 2
    put_back.all()
    assert (unchanged, changed) == ({"a": 1}, {"a": 1})


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class Ordered(Loud, collections.OrderedDict[str, Tensor]):
    pass


class Defaults(Loud, collections.defaultdict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Ordered({"b": torch.zeros(1), "a": torch.ones(1)}),
        Defaults(int, a=1),
        collections.deque([1, 2], maxlen=2),
        collections.Counter("aab"),
        {1, 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_copied_by_what_it_is(value: Any) -> None:
    copied = plain_copy(value)
    assert type(copied) is type(value)
    assert copied is not value
    assert list(copied) == list(value)
    assert getattr(copied, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(copied, "default_factory", None) is getattr(value, "default_factory", None)


def test_slots_are_copied() -> None:
    copied = plain_copy(Slotted())
    assert copied.a == 1
    assert not hasattr(copied, "b")
