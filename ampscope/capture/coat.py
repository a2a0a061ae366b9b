"""Changes the behaviour of one object by giving it a subclass of its own class, and takes it off again.

Unlike a patched method or a hook, nothing is stored in the object: ``isinstance``, ``state_dict``, ``pickle``,
``deepcopy`` and a later ``restore`` see it as it was. Copies and pickles are made of the original class.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Coat:
    """Base of the behaviour that is put over an object's class; `ampscope_owner` is set per watched object."""

    ampscope_owner: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        coated, plain = type(self), plain_class(self)
        make, args, *rest = reduced
        args = tuple(plain if arg is coated else arg for arg in args)
        return (plain if make is coated else make, args, *rest)


def is_coated(thing: object) -> bool:
    """Whether ``thing`` wears a coat now."""
    return isinstance(thing, Coat) and "ampscope_owner" in vars(type(thing))


def plain_class(thing: object) -> type:
    """The class ``thing`` had before `put_on`; its class where it wears none."""
    return type(thing).__bases__[1] if is_coated(thing) else type(thing)


def put_on(thing: T, coat: type[Coat], owner: Any) -> T:
    """Gives ``thing`` the behaviour of ``coat``, on top of its own class.

    Raises:
        TypeError: Python does not allow another class on this object.
    """
    plain = type(thing)
    names = {"ampscope_owner": owner, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    names["__doc__"] = plain.__doc__
    thing.__class__ = type(plain.__name__, (coat, plain), names)
    return thing


def take_off(thing: object) -> None:
    """Restores the class ``thing`` had before `put_on`."""
    if is_coated(thing):
        thing.__class__ = plain_class(thing)
