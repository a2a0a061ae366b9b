"""Instrumenting changes what one object does, and nothing else about it."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest

from ampscope.capture.hooks import instrumented


class Greeter:
    registered: ClassVar[list[type]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def __init_subclass__(cls) -> None:
        Greeter.registered.append(cls)

    def greet(self) -> str:
        return f"hello {self.name}"


class Polite(instrumented.Instrumented):
    def greet(self) -> str:
        return f"{super().greet()}, says {self.ampscope_owner}"  # type: ignore[misc]


@pytest.fixture
def greeter() -> Greeter:
    return instrumented.instrument(Greeter("you"), Polite, "me")


def test_behaviour_is_added_on_top(greeter: Greeter) -> None:
    assert greeter.greet() == "hello you, says me"
    assert instrumented.is_instrumented(greeter)
    assert instrumented.plain_class(greeter) is Greeter


def test_nothing_is_stored_in_the_object(greeter: Greeter) -> None:
    assert vars(greeter) == {"name": "you"}


def test_other_objects_of_the_class_are_not_concerned(greeter: Greeter) -> None:
    assert Greeter("them").greet() == "hello them"
    assert not instrumented.is_instrumented(Greeter("them"))
    other = instrumented.instrument(Greeter("them"), Polite, "another")
    assert (greeter.greet(), other.greet()) == ("hello you, says me", "hello them, says another")


def test_it_comes_off_without_a_trace(greeter: Greeter) -> None:
    instrumented.restore(greeter)
    assert type(greeter) is Greeter
    assert greeter.greet() == "hello you"
    instrumented.restore(greeter)
    assert type(greeter) is Greeter


def test_the_class_answers_as_the_one_it_covers(greeter: Greeter) -> None:
    assert greeter.__class__ is Greeter
    assert isinstance(greeter, Greeter)
    assert type(greeter).__name__ == "Greeter"
    assert (type(greeter).__module__, type(greeter).__qualname__) == (__name__, "Greeter")


def test_the_users_subclass_hook_is_not_run(greeter: Greeter) -> None:
    assert Greeter.registered == [Special, Loud]  # those that this file defines


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_copies_and_pickles_are_plain(greeter: Greeter, protocol: int) -> None:
    for twin in (
        copy.copy(greeter),
        copy.deepcopy(greeter),
        pickle.loads(pickle.dumps(greeter, protocol)),  # noqa: S301  # our own bytes
    ):
        assert type(twin) is Greeter
        assert twin.name == "you"
    assert instrumented.is_instrumented(greeter)


class Special(Greeter):
    """Says by itself how it is copied and pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.name,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.name.upper())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_also_where_the_class_has_its_own_way(protocol: int) -> None:
    special = instrumented.instrument(Special("you"), Polite, "me")
    assert type(pickle.loads(pickle.dumps(special, protocol))) is Special  # noqa: S301
    twin = copy.deepcopy(special)
    assert type(twin) is Special
    assert twin.name == "YOU"
    assert special.greet() == "hello you, says me"


class Loud(Greeter):
    def greet(self) -> str:
        return super().greet().upper()


def test_an_assigned_class_becomes_the_one_it_covers(greeter: Greeter) -> None:
    greeter.__class__ = Loud
    assert greeter.__class__ is Loud
    assert greeter.greet() == "HELLO YOU, says me"
    assert vars(greeter) == {"name": "you"}
    instrumented.restore(greeter)
    assert type(greeter) is Loud


def test_the_class_of_another_instrumented_object_is_taken_without_its_behaviour(greeter: Greeter) -> None:
    greeter.__class__ = type(instrumented.instrument(Loud("them"), Polite, "another"))
    assert greeter.greet() == "HELLO YOU, says me"


def test_a_class_that_cannot_be_assigned_leaves_all_as_it_was(greeter: Greeter) -> None:
    with pytest.raises(TypeError):
        greeter.__class__ = int  # type: ignore[assignment]  # what the test is about
    assert greeter.greet() == "hello you, says me"
