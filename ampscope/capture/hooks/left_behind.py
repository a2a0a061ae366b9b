"""Cleans up the modes that a run leaves on its loop's thread when another thread closes the run.

Torch keeps its stacks of modes for each thread, and none can reach another's. So the modes stay there, pass on what
they hear, and go when the loop next comes by a hook of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support.calls.threads import HomeThread, changing

_left: set[LeftBehind] = set()


def leave(is_swept: Callable[[], bool], ended: Callable[[], object], home: HomeThread) -> None:
    """Has ``is_swept`` called in the loop's thread until it says that nothing is there any more.

    Args:
        is_swept: Takes away what is there.
        ended: Called, in any thread, when the loop's has ended before.
        home: The thread of the loop.
    """
    with changing:
        if (life := home.life) is None:
            ended()
            return
        left = LeftBehind(is_swept, ended)
        _left.add(left)
        process_hooks.join(left, home)
        weakref.finalize(life, left.thread_ended).atexit = False


class LeftBehind:
    """Hears of the loop's next calls; see `process_hooks.Listener`.

    Args:
        is_swept: Takes everything away; returns whether all of it is gone.
        ended: Called when the thread has ended before that.
    """

    def __init__(self, is_swept: Callable[[], bool], ended: Callable[[], object]) -> None:
        self._is_swept, self._ended = is_swept, ended

    def thread_ended(self) -> None:
        """The loop will not come by any more."""
        with changing:
            if self in _left:
                self._ended()
                self._end()

    def _end(self) -> None:
        with changing:
            _left.discard(self)
            process_hooks.leave(self)

    def _comes_by(self) -> None:
        if self._is_swept():
            self._end()

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Sweeps, before the backward."""
        self._comes_by()
        return call(*args, **kwargs)

    def backward_comes(self) -> None:
        """See `process_hooks.Listener`."""

    def backward_lost(self) -> None:
        """See `process_hooks.Listener`."""

    def before_optimizer(self, *_: Any, **__: Any) -> None:
        """Sweeps. Torch goes through the hooks of optimizers just now, so its own stay."""
        self._is_swept()

    def closure(self, _: Any, call: Callable[[], Any]) -> Any:
        """Runs the closure."""
        return call()

    def after_optimizer(self, _: Any) -> None:
        """Has swept before."""

    def scheduled(self, _: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()

    def region_switched_off(self, *_: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()

    def adopt(self, _: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()
