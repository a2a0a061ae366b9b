"""Calls belong to threads: listeners hear those of their own, and what replaces a function of torch's holds for one."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from threading import get_ident
from typing import Any, Generic, TypeVar

import torch

#: Held while anything process-wide of AMPscope's is put in place or taken away; for moments, or while a run opens.
changing = threading.RLock()
if hasattr(os, "register_at_fork"):  # another thread, which the child has not, may hold it
    os.register_at_fork(after_in_child=changing._at_fork_reinit)  # type: ignore[attr-defined]  # for logging's sake


class ThreadLife:
    """Something that lives as long as a thread does."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    """Holds for each thread the object that lives as long as it does."""

    def __init__(self) -> None:
        self.life = ThreadLife()


_here = _Here()


class HomeThread:
    """The thread that trains a run's models, with autograd's own threads while they work for it.

    It is the one that first calls a model to train it, and another one only once that has ended.

    Attributes:
        ident: Its identifier; None before it is chosen.
    """

    __slots__ = ("_life", "_opened_in", "ident")

    def __init__(self) -> None:
        self.ident: int | None = None
        self._life: weakref.ref[ThreadLife] | None = None
        self._opened_in = threading.get_ident()

    def is_entered(self) -> bool:
        """A model is called; returns whether in this thread, which is chosen by that."""
        here = threading.get_ident()
        if self._life is not None and self._life() is not None:
            return self.ident == here
        if not torch.is_grad_enabled():
            return self.ident is None and here == self._opened_in  # trains nothing: the training may come elsewhere
        self.ident, self._life = here, weakref.ref(_here.life)
        _mark(here)
        return True

    @property
    def life(self) -> ThreadLife | None:
        """An object that lives as long as the thread; None before the thread is chosen, and once it has ended."""
        return self._life() if self._life is not None else None

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return self._life is not None and self._life() is not None

    @property
    def is_known(self) -> bool:
        """Whether calls from here would be this thread's; before it is chosen, the one in which the run was opened."""
        return (self._opened_in if self.ident is None else self.ident) == origin()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is another thread than the one for which this is run."""
        return self.ident is not None and self.ident != origin()

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether it is another thread, which may be in the midst of a step."""
        return self.is_elsewhere and self.goes_on


#: What torch keeps for a thread and gives to autograd's own threads with each backward that it calls. Torch's own
#: backward uses these functions; without them only the calling thread is known.
_put, _has, _get = (
    getattr(torch._C, name, None) for name in ("_stash_obj_in_tls", "_is_key_in_tls", "_get_obj_in_tls")
)
_MARK = "ampscope_thread"


def _mark(thread: int) -> None:
    if _put is not None:
        _put(_MARK, thread)


def origin() -> int:
    """The thread that runs this; on a thread of autograd's, the one whose backward it works for."""
    marked = _has is not None and _get is not None and _has(_MARK)
    thread: int = _get(_MARK) if marked and _get is not None else threading.get_ident()
    return thread


def whatever_comes(put_back: Callable[[], object]) -> None:
    """Puts something back, once more where that was interrupted; what has interrupted it goes on."""
    try:
        put_back()
    except BaseException:
        put_back()
        raise


class PerThread:
    """A function of torch's in whose place a thread may have another one; all others call torch's.

    Two threads may do so at a time, and end in any order.

    Args:
        home: The module that has it.
        name: Its name there.
    """

    def __init__(self, home: Any, name: str) -> None:
        self._home = home
        self._name = name
        self._lock = threading.Lock()
        self._instead: dict[int, list[Callable[..., Any]]] = {}
        self._original: Callable[..., Any] | None = None  #: while ours is in its place
        self._ours: Callable[..., Any] | None = None

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Has this thread call something else in the body.

        Args:
            make: Is given what it would have called, and returns what it calls.
        """
        here = origin()
        before = self._instead.get(here, [])
        try:
            with self._lock:
                original = self._original if self._original is not None else self._put_ours()
                self._instead[here] = [*before, make(before[-1] if before else original)]
            yield
        finally:
            whatever_comes(partial(self._go_back, here, before))

    def _go_back(self, here: int, before: list[Callable[..., Any]]) -> None:
        """A thread calls what it called before; safe to call again where something came in between."""
        with self._lock:
            if before:
                self._instead[here] = before
            else:
                self._instead.pop(here, None)
            if not self._instead:
                self._take_ours()

    def _put_ours(self) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(self._home, self._name)
        instead = self._instead

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            chosen = instead.get(origin())
            return (chosen[-1] if chosen else original)(*args, **kwargs)

        self._original, self._ours = original, ours  # before it is there: who takes it away knows what was
        setattr(self._home, self._name, ours)
        return original

    def _take_ours(self) -> None:
        """Unless somebody has put something around ours, which only passes calls on from now on."""
        if self._ours is not None and getattr(self._home, self._name) is self._ours:
            setattr(self._home, self._name, self._original)
        self._original = self._ours = None


class Together:
    """A process-wide context in which several threads may be at a time: the first enters it, the last one leaves it.

    Args:
        enter: Makes the context.
    """

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._enter = enter
        self._lock = threading.Lock()
        self._inside = 0
        self._context = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._context.enter_context(self._enter())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                whatever_comes(self._context.close)


L = TypeVar("L")


class Listeners(Generic[L]):
    """Listeners, none of them kept alive: whether a scope is still wanted is seen by who else holds it.

    Whoever lets any join or leave holds `changing`.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[L], HomeThread]] = []

    def join(self, listener: L, home: HomeThread) -> None:
        """Tells ``listener`` from now on of what its thread calls."""
        self._known.append((weakref.ref(listener), home))

    def leave(self, listener: L) -> bool:
        """Tells it no more; returns whether nobody is left. Those that are gone are forgotten too."""
        self._known = [each for each in self._known if each[0]() is not None and each[0]() is not listener]
        return not self._known

    def __iter__(self) -> Iterator[L]:
        """Yields the listeners that this thread's calls concern: its own loop's, and those without a thread yet."""
        found = []
        for known, home in self._known:
            is_here = home.ident == get_ident() or not home.is_elsewhere
            if is_here and (listener := known()) is not None:
                found.append(listener)
        return iter(found)

    def everywhere(self) -> list[L]:
        """All of them."""
        return [listener for known, _ in self._known if (listener := known()) is not None]

    def __bool__(self) -> bool:
        return bool(self._known)
