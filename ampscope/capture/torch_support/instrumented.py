"""Changes the behaviour of one object by giving it a subclass of its own class, and takes it off again.

Unlike a patched method or a hook, nothing is stored in the object, and it says to be of its old class: ``isinstance``,
``state_dict``, ``pickle`` and ``deepcopy`` see it as it was. Copies and pickles are of the original class.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_real_class = object.__dict__["__class__"]


class Coat:
    """Base of the behaviour that is put over an object's class; `ampscope_owner` is set per watched object."""

    ampscope_owner: Any = None
    ampscope_wearer: int = 0  #: ``id`` of the one object that `put_on` dressed

    def __init_subclass__(cls, **_: Any) -> None:
        """Does not tell the user's class that it has a new subclass: registries stay as they are."""

    @property  # type: ignore[misc]  # read-only on purpose: `put_on` and `take_off` go past it
    def __class__(self) -> type:
        """The class the object had, for whoever asks it rather than ``type``."""
        return plain_class(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _taken_off(self):
            return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _taken_off(self):
            return copy.deepcopy(self, memo)


class _Like(type):
    """Metaclass of coated classes: each equals the class it covers, and makes instances of that one."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is cls.__bases__[1]

    def __hash__(cls) -> int:
        return hash(cls.__bases__[1])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__bases__[1](*args, **kwargs)


def is_coated(thing: object) -> bool:
    """Whether ``thing`` wears a coat now."""
    return isinstance(type(thing), type) and getattr(type(thing), "ampscope_wearer", 0) == id(thing)


def plain_class(thing: object) -> type:
    """The class ``thing`` had before `put_on`; its class where it wears none."""
    kind = type(thing)
    return kind.__bases__[1] if "ampscope_wearer" in vars(kind) else kind


def put_on(thing: T, coat: type[Coat], owner: Any) -> T:
    """Gives ``thing`` the behaviour of ``coat``, on top of its own class.

    Raises:
        TypeError: Python does not allow a subclass of this class, or another class on this object.
    """
    plain = type(thing)
    names = {
        "ampscope_owner": owner,
        "ampscope_wearer": id(thing),
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    make = type("Like", (_Like, type(plain)), {})
    _real_class.__set__(thing, make(plain.__name__, (coat, plain), names))
    return thing


def take_off(thing: object) -> None:
    """Restores the class ``thing`` had before `put_on`."""
    if is_coated(thing):
        _real_class.__set__(thing, plain_class(thing))


@contextlib.contextmanager
def _taken_off(thing: object) -> Iterator[None]:
    coated = type(thing)
    _real_class.__set__(thing, plain_class(thing))
    try:
        yield
    finally:
        _real_class.__set__(thing, coated)
