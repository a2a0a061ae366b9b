"""Whatever a model takes or returns: its tensors are found in order, and a copy holds others in their place."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import tensor_tree
from tests.support.training.small_loop import BATCH, WIDTH
from tests.support.training.small_models import TwoLayers

A, B, C = (torch.tensor(float(n)) for n in range(3))


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass
class Record:
    one: Any
    other: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    one: Any
    other: Any = None


class Batch:
    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other


class Defaults(dict[str, Any]):
    pass


SHAPES: dict[str, Any] = {
    "tensor": (A, [A]),
    "tuple": ((A, 1, B), [A, B]),
    "list": ([A, None, [B, [C]]], [A, B, C]),
    "set": ({A}, [A]),
    "dict": ({"x": A, "n": 3, "y": {"z": B}}, [A, B]),
    "ordered dict": (collections.OrderedDict(a=A, b=B), [A, B]),
    "default dict": (collections.defaultdict(list, a=[A]), [A]),
    "subclass of dict": (Defaults(a=A), [A]),
    "deque": (collections.deque([A, B], maxlen=2), [A, B]),
    "named tuple": (Pair(A, [B]), [A, B]),
    "dataclass": (Record(A, {"k": B}), [A, B]),
    "frozen dataclass with slots": (Slotted(A, (B,)), [A, B]),
    "plain object": (Batch(A, [B]), [A, B]),
    "namespace": (SimpleNamespace(x=A), [A]),
    "the same twice": ([A, A], [A, A]),
    "nothing": ((1, "text", None, b"", 2.5, torch.float16, torch.Size([2])), []),
    "a module is not entered": (nn.Linear(1, 1), []),
    "a function is not entered": ((len, lambda: A), []),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_found_in_a_stable_order(shape: str) -> None:
    value, expected = SHAPES[shape]
    assert [id(tensor) for tensor in tensor_tree.tensors(value)] == [id(tensor) for tensor in expected]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_has_the_same_shape_and_the_original_is_untouched(shape: str) -> None:
    value, expected = SHAPES[shape]
    copied = tensor_tree.rebuild(value, lambda tensor: tensor + 10)
    assert type(copied) is type(value)
    assert [float(tensor) for tensor in tensor_tree.tensors(copied)] == [float(tensor) + 10 for tensor in expected]
    assert [id(tensor) for tensor in tensor_tree.tensors(value)] == [id(tensor) for tensor in expected]
    if not expected:
        assert copied is value or copied == value


def test_there_and_back_again() -> None:
    """Tensors packed into stand-ins of another type and unpacked from them, as the tape does."""

    class Ticket:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    value = {"x": (A, Pair(B, [C])), "n": 1, "r": Record(A)}
    packed = tensor_tree.rebuild(value, Ticket)
    assert not list(tensor_tree.tensors(packed["n"]))
    unpacked = tensor_tree.rebuild(packed, lambda ticket: ticket.tensor, Ticket)
    assert [id(tensor) for tensor in tensor_tree.tensors(unpacked)] == [id(t) for t in (A, B, C, A)]


def test_named_results_of_torch() -> None:
    top = torch.max(torch.eye(3), dim=1)
    copied = tensor_tree.rebuild(top, lambda tensor: tensor + 1)
    assert type(copied) is type(top)
    assert torch.equal(copied.values, top.values + 1)


def test_a_packed_sequence() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    copied = tensor_tree.rebuild(packed, lambda tensor: tensor + 1)
    assert type(copied) is type(packed)
    assert torch.equal(copied.data, packed.data + 1)
    assert copied.sorted_indices is None


def test_sharing_inside_a_value_is_kept() -> None:
    shared = [A]
    copied = tensor_tree.rebuild({"x": shared, "y": shared}, lambda tensor: tensor + 1)
    assert copied["x"] is copied["y"]


def test_references_that_go_round_end() -> None:
    batch = Batch(A, None)
    batch.other = [batch] * 10
    assert [id(tensor) for tensor in tensor_tree.tensors(batch)] == [id(A)]
    tensor_tree.rebuild(batch, lambda tensor: tensor)


def test_containers_made_on_the_way_are_not_taken_for_each_other() -> None:
    """A mapping that makes its values when they are asked for: their addresses are used again."""

    class Lazy(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return [{"a": A, "b": B, "c": C}[key]]

        def __iter__(self) -> Iterator[str]:
            return iter("abc")

        def __len__(self) -> int:
            return 3

    assert [id(tensor) for tensor in tensor_tree.tensors(Lazy())] == [id(A), id(B), id(C)]


def test_a_whole_data_set_behind_a_batch_is_not_walked() -> None:
    seen = 0

    class Many(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal seen
            for item in super().__iter__():
                seen += 1
                yield item

    list(tensor_tree.tensors(Batch(A, Many([1] * 100_000))))
    assert seen < 20_000


def test_a_large_object_among_the_arguments_costs_little(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary, a reference to the data set, references that go round: the walk over arguments is bounded."""
    looked_at = 0

    class Words(dict[str, int]):
        def values(self) -> Any:
            nonlocal looked_at
            for value in super().values():
                looked_at += 1
                yield value

    class Batch:
        def __init__(self) -> None:
            self.x = torch.randn(BATCH, WIDTH)
            self.words = Words((str(n), n) for n in range(20_000))
            self.friends = [self] * 8

    class Taking(TwoLayers):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch.x)

    model = Taking()
    watch(model, every=0)
    model(Batch()).sum().backward()
    assert looked_at < 100_000
