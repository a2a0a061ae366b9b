"""The loop mode hears what a loop calls between two steps; it is there only where the loop carries tensors."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampscope.capture.tape.after_backward import FIRST_STEPS
from ampscope.capture.torch_support import dynamo, guard, torch_private
from ampscope.capture.torch_support.function_names import draws_random_numbers, is_in_place, leaves_all_as_it_is
from ampscope.capture.torch_support.guard import NOT_RUN, Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import FastPaths, Pause, PausedCall
from ampscope.capture.torch_support.sharding import obstacle_to_replay

#: Calls that write zeros (gradients, mostly) or the loss scale: none of them can leave what the loop did not mean.
_PASSED_OVER = ("zero_", "_foreach_zero_", "_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_")


class CallKeeper(Protocol):
    """Takes the calls between two steps down."""

    guard: Guard

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """Copies of what a function is about to overwrite, by ``id``."""

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, originals: dict[int, Tensor]
    ) -> bool:
        """A function has run; returns whether more calls are to be told of."""


class LoopMode(TorchFunctionMode):
    """Knows its keeper weakly: torch's stack of modes is a root for the garbage collector.

    Args:
        keeper: Is told of the calls.
        pause: On while AMPscope's own code computes.
    """

    def __init__(self, keeper: CallKeeper, pause: Pause) -> None:
        super().__init__()
        self._keeper = weakref.ref(keeper)
        self.inserted = False  #: on the stack of the loop's thread, unless torch or a module has taken it off for now
        self._handling = 0  # inside a handled function torch has taken this mode off the stack by itself
        self._thread = 0  # in which it was put there
        self._heard_enough = False
        self._aside = False
        self._pause = pause
        self._fast_paths = FastPaths(self._leave, self._came_back)

    def insert(self) -> None:
        """Starts listening."""
        self._heard_enough = False
        if not (self.inserted and self._is_here()) and not self._handling:
            self._put()

    def step_aside(self) -> None:
        """Leaves the stack for a call of a watched model, which is not followed between steps."""
        if self.inserted and not self._handling:
            self.remove()
            self._aside = True

    def come_back(self) -> None:
        """Goes back onto the stack after the call of a watched model has returned."""
        if self._aside:
            self._aside = False
            self._put()

    def _put(self) -> None:
        self.inserted, self._thread = True, threading.get_ident()  # first: what is broken off is taken away later
        torch_private.insert_function_mode(self)
        self._fast_paths.insert()

    def _is_here(self) -> bool:
        return self._thread == threading.get_ident()

    def remove(self) -> None:
        """Stops listening; safe to call twice. In another thread than the one that listens it does nothing."""
        self._aside = False
        if self.inserted and not self._handling and self._is_here():
            guard.surely(partial(torch_private.remove_function_mode, self))
            guard.surely(self._fast_paths.remove)
            self.inserted = False

    def leave_off(self) -> None:
        """Hears nothing more, wherever it is."""
        self._heard_enough, self._aside = True, False

    def let_go(self) -> None:
        """The thread that listened has ended, and its stack with it."""
        self._thread = threading.get_ident()
        self.remove()

    def _leave(self) -> bool:
        """Leaves the stack for the call of a module that computes otherwise while a mode is active, if it can."""
        if self._handling:
            return False
        torch_private.remove_function_mode(self)
        return True

    def _came_back(self, call: PausedCall | None) -> None:
        """Goes back onto the stack after a module's call for which it has left, and has that taken down as one."""
        torch_private.insert_function_mode(self)
        keeper = None if self._pause.on or self._heard_enough or call is None else self._keeper()
        if keeper is not None and call is not None and not keeper.guard.broken:
            self._pause.begin_aside()
            with keeper.guard:
                self._heard_enough = not keeper.called(call.module, call.args, call.kwargs, call.result, {})
            self._pause.end_glance()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = NOT_RUN
        try:
            keeper = None if self._pause.on or self._heard_enough else self._keeper()
            if self._pause.cuda and self._pause.captures():
                keeper = None
            if keeper is None or keeper.guard.broken or leaves_all_as_it_is(func, args) or _is_foreign(func):
                return func(*args, **kwargs)
            self._handling += 1
            try:
                originals: dict[int, Tensor] = {}
                self._pause.begin()
                with keeper.guard:
                    originals = keeper.before_write(func, args, kwargs) if is_in_place(func, kwargs) else {}
                self._pause.end()
                result = func(*args, **kwargs)
                self._pause.begin()
                with keeper.guard:
                    self._heard_enough = not keeper.called(func, args, kwargs, result, originals)
            finally:
                self._pause.end()
                self._handling -= 1
        except BaseException as error:  # noqa: BLE001  # a door
            guard.left(error)
        return func(*args, **kwargs) if result is NOT_RUN else result


def _is_foreign(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _PASSED_OVER or draws_random_numbers(name):
        return True
    return torch_private.is_tracing() or torch_private.in_functorch()


#: The first steps, in which is learned whether the loop carries anything; learned again around powers of two.
LEARNED_STEPS = 3
#: The steps in which a loop that computes what its steps read is listened to: most failures come early.
MADE_STEPS = 32
#: Steps after which a loop is no longer listened to between them, where none has read what it carries.
PATIENCE = 32
#: As many where something that is not finite is waiting to be read.
PATIENCE_WITH_BAD = 1024
#: Calls between two steps that are heard whenever the loop is followed; longer programs are learned, then left alone.
MOST_HEARD = 16
#: Steps after one that went wrong for which the loop is listened to between them, too.
ALERT_STEPS = 8


class Following:
    """Whether a loop is worth being listened to between its steps.

    Attributes:
        learning: It is one of the steps in which is learned what the loop carries.
        idle: Steps since one read what the loop carries.
    """

    def __init__(self, models: Models) -> None:
        self.learning = True
        self.idle = 0
        self._models = models
        self._early = self._young = True
        self._alert = 0  # steps for which it goes on
        self._obstacle = (-1, "")  # to following, as of that revision of the models

    def step_ended(self, number: int, *, bad: bool) -> None:
        """Updates what is followed after a step has ended; ``number`` says how many have."""
        self._alert = ALERT_STEPS if bad else max(self._alert - 1, 0)
        self._early, self._young = number < FIRST_STEPS, number < MADE_STEPS
        self.learning = number <= LEARNED_STEPS or not number & (number - 1) or not (number - 1) & (number - 2)

    def is_on(self, *, carries: bool, suspects: bool, makes: bool) -> bool:
        """Whether steps, and what the loop does between them, are followed.

        Args:
            carries: The loop is known to carry something.
            suspects: Something is there that the loop made inf or NaN, and that no step has read yet.
            makes: The loop computes what its steps read.
        """
        patience = PATIENCE_WITH_BAD if suspects else PATIENCE
        wanted = (carries or suspects) and self.idle < patience
        return self.learning or self._alert > 0 or wanted or (makes and self._young)

    def hears(self, calls: int, *, suspects: bool, makes: bool) -> bool:
        """Whether a loop that is followed is listened to now, too: a long program is known, and costs much to hear.

        Args:
            calls: That the loop made when it was listened to last.
            suspects: As for `is_on`.
            makes: As for `is_on`.
        """
        wanted = self._early or self.learning or self._alert > 0 or suspects or (makes and self._young)
        return wanted or calls <= MOST_HEARD

    def may_listen(self) -> bool:
        """Whether a mode may be installed: a compiler would put it into the loop's code.

        Wrappers that shard give the memory of weights back, and none of it is to be read.
        """
        return not dynamo.in_use() and not self._found_obstacle()

    def _found_obstacle(self) -> str:
        if self._obstacle[0] != self._models.revision:
            modules = itertools.chain(self._models.roots, self._models.modules)
            self._obstacle = self._models.revision, obstacle_to_replay(modules)
        return self._obstacle[1]
