"""Changes the behaviour of one object by giving it a subclass of its own class, and restores it.

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


class Instrumented:
    """Base of the behaviour that is added to an object's class; `ampscope_owner` is set per instrumented object."""

    ampscope_owner: Any = None
    ampscope_instance: int = 0  #: ``id`` of the one object that `instrument` was given

    def __init_subclass__(cls, **_: Any) -> None:
        """Does not tell the user's class that it has a new subclass: registries stay as they are."""

    @property
    def __class__(self) -> type:
        """The class the object had, for whoever asks it rather than ``type``."""
        return plain_class(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Gives the object another class of its own (``fully_shard``, ``parametrize``); the behaviour stays on top."""
        instrumented = type(self)
        if not is_instrumented(self):  # a copy that was made without `__reduce_ex__`
            _real_class.__set__(self, kind)
        else:
            _real_class.__set__(self, _extended(self, _plain(kind), instrumented.__bases__[0], self.ampscope_owner))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _restored(self):
            return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _restored(self):
            return copy.deepcopy(self, memo)


class _EqualsPlain(type):
    """Metaclass of instrumented classes: each equals the class it extends, and makes instances of that one."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is cls.__bases__[1]

    def __hash__(cls) -> int:
        return hash(cls.__bases__[1])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__bases__[1](*args, **kwargs)


def is_instrumented(thing: object) -> bool:
    """Whether ``thing`` is instrumented now."""
    return isinstance(type(thing), type) and getattr(type(thing), "ampscope_instance", 0) == id(thing)


def plain_class(thing: object) -> type:
    """The class ``thing`` had before `instrument`; its class where it is not instrumented."""
    return _plain(type(thing))


def _plain(kind: type) -> type:
    return kind.__bases__[1] if "ampscope_instance" in vars(kind) else kind


def instrument(thing: T, behaviour: type[Instrumented], owner: Any) -> T:
    """Gives ``thing`` the behaviour of a class, on top of its own class.

    Args:
        thing: Any object.
        behaviour: What is added.
        owner: Becomes ``ampscope_owner``, whom the behaviour calls.

    Raises:
        TypeError: Python does not allow a subclass of this class, or another class on this object.
    """
    _real_class.__set__(thing, _extended(thing, type(thing), behaviour, owner))
    return thing


def _extended(thing: object, plain: type, behaviour: type, owner: Any) -> type:
    """The class of one object: a behaviour on top of its own class.

    Raises:
        TypeError: Python does not allow a subclass of this class.
    """
    names = {
        "ampscope_owner": owner,
        "ampscope_instance": id(thing),
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    make = type("EqualsPlain", (_EqualsPlain, type(plain)), {})
    made: type = make(plain.__name__, (behaviour, plain), names)
    return made


def restore(thing: object) -> None:
    """Restores the class ``thing`` had before `instrument`."""
    if is_instrumented(thing):
        _real_class.__set__(thing, plain_class(thing))


@contextlib.contextmanager
def _restored(thing: object) -> Iterator[None]:
    instrumented = type(thing)
    _real_class.__set__(thing, plain_class(thing))
    try:
        yield
    finally:
        _real_class.__set__(thing, instrumented)
