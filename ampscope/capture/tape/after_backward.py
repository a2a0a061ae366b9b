"""Decides whether the loop's own code after backward is listened to: it is the same program in nearly every step.

A function mode that hears it costs many times what that code does. So it is heard until it is known: in the first
steps, and from time to time. In all others nothing listens there. What can be asked without listening (which call came
from which line, how often gradients and weights were written in between) tells in the same step when the loop does
something else.
"""

from __future__ import annotations

from operator import attrgetter
from types import FrameType

from torch import Tensor

from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.sharding import PLAIN
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import NOWHERE, Place

#: The first steps are heard, and at least as many that went well.
FIRST_STEPS, FIRST_GOOD_STEPS = 8, 3
#: Steps that are heard after one that went wrong, or was not as those before; of the latter ever more, up to so many.
ALERT_STEPS, MOST_ALERT_STEPS = 8, 64
#: Functions that set tensors to zero.
EMPTYING = frozenset(("zero_", "_foreach_zero_"))
#: Beginnings of steps that are remembered.
_MOST_KNOWN = 4096

_version, _PLAIN = attrgetter("_version"), frozenset(PLAIN)


class Routine:
    """The steps of one loop, as far as they are alike.

    The *way* of a step is the chain of what was seen of it without listening. Each beginning of a way that a step has
    gone which was heard, and went well, is known.

    Args:
        models: The watched models.

    Attributes:
        always: Every step is heard: what the loop does there is no routine.
        edits: It has changed unscaled gradients by more than torch's own clipping, in the latest step that was heard.
        is_awake: The present step is heard; else only that of it which a later backward depends on.
        emptied: The loop has set gradients to zero that a backward had left: a decision, which may come again.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._weights: list[Tensor] = []
        self._revision = -1
        self._known: set[int] = set()
        self._programs: set[tuple[int, int]] = set()
        self._gone: list[int] = []  # the beginnings of the present step's way
        self._way = self._program = 0
        self.is_awake = True
        self._settled = {
            True: False,
            False: False,
        }  # by whether it was traced: the latest step heard did what was known
        self._good = self._alert = self._number = 0
        self._missed, self._patience = False, ALERT_STEPS  # the step was heard too late to know all that it did
        self._was_traced = self._is_traced = False
        self._backwards = 0
        self._read_later: set[int] = set()  # backwards after which the loop computes what a later one begins from
        self._written: tuple[int, int, int] | None = None
        self._gradients = 0
        self._changes = False  # the loop was heard to write or assign something after the latest backward
        self._clipped: set[int] = set()  # ways that end with a backward whose gradients the loop has then changed
        self._after_backward = 0  # the present way as the latest backward has ended
        self.always = self.edits = self.emptied = False

    def begin(self, number: int) -> None:
        """Step ``number`` of the process begins."""
        self._number, self._program, self._backwards, self._written = number, 0, 0, None
        self._missed = self._changes = False
        self._way, self._gone = 0, []
        if self._revision != self._models.revision:
            self._revision, self._settled = self._models.revision, {True: False, False: False}
            self._known.clear()
            self._programs.clear()
            self._clipped.clear()
        weights = [weight for _, weight in self._models.parameters.values()]
        self._weights = weights if _PLAIN.issuperset(map(type, weights)) else []
        first = number < FIRST_STEPS or self._good < FIRST_GOOD_STEPS or not number & (number - 1)
        self.is_awake = self.always or first or self._alert > 0 or not any(self._settled.values())
        self._was_traced, self._is_traced = self._is_traced, False

    def listens(self, *, traced: bool) -> bool:
        """Whether it is to be heard what the loop does now, after a backward.

        Args:
            traced: Each op of the step is recorded; the first of such steps in a row is heard, too.
        """
        self._is_traced = traced
        if not self._settled[traced] or (traced and not self._was_traced):
            self.is_awake = True
        return self.is_awake or self._backwards in self._read_later

    @property
    def changes_unheard(self) -> bool:
        """Whether the loop is taken to change its unscaled gradients in this step, though nobody hears it."""
        return self.edits and not self.is_awake

    @property
    def may_change_gradients(self) -> bool:
        """Whether the loop may change the gradients that the latest backward has left, before an optimizer steps."""
        return self.is_awake or self._way in self._clipped

    def heard(self, name: str, frame: FrameType | None, *, writes: bool) -> None:
        """A torch function was called in a frame, after a backward; ``writes``: it writes or assigns something."""
        self._changes = self._changes or writes
        self.emptied = self.emptied or name in EMPTYING
        above = frame.f_back if frame is not None else None
        where = (id(frame.f_code), frame.f_lineno) if frame is not None else None
        self._program = hash((self._program, name, where, (id(above.f_code), above.f_lineno) if above else None))

    def comes(self, kind: str, whose: object = None, place: Place = NOWHERE) -> bool:
        """A call comes; returns whether it was to be expected, after all that came before it.

        Args:
            kind: Of the call.
            whose: The optimizer, scaler or module.
            place: From which line.
        """
        return self._goes_on(hash((self._way, kind, id(whose), id(place.code), place.line, self._writes())))

    def backward_ended(self) -> None:
        """Gradients are there: from now on the loop may write them."""
        self._backwards += 1
        self._goes_on(hash((self._way, "backward")))
        self._after_backward, self._written = self._way, self._counts()

    def read_later(self) -> None:
        """A backward begins from what the loop has computed since the one before."""
        self._read_later.add(self._backwards)

    def _goes_on(self, way: int) -> bool:
        self._way = way
        self._gone.append(way)
        if self.is_awake or way in self._known:
            return True
        self.is_awake = self._missed = True
        self._alert, self._patience = self._patience, min(2 * self._patience, MOST_ALERT_STEPS)
        return False

    def _counts(self) -> tuple[int, int, int]:
        """Counts how often gradients and weights were written, and tells which gradients there are."""
        gradients = [gradient for weight in self._weights if (gradient := weight.grad) is not None]
        self._gradients = len(gradients)
        try:
            written = sum(map(_version, gradients)), sum(map(_version, self._weights))
        except RuntimeError:  # tensors made in inference mode have no counter
            written = sum(map(version_counter, gradients)), sum(map(version_counter, self._weights))
        return hash(tuple(map(id, gradients))), *written

    def _writes(self) -> object:
        """Tells what was written since it was asked last: how often each gradient, and how many weights.

        In a traced step that is not known: a call for a list of tensors moves no counter under a dispatch mode.
        """
        if self._written is None or self._is_traced:
            return self._is_traced
        before, self._written = self._written, self._counts()
        now = self._written
        if now[:2] != before[:2]:
            self._clipped.add(self._after_backward)
        if before[0] != now[0]:
            return "other gradients", now[2] - before[2]
        return divmod(now[1] - before[1], self._gradients or 1), now[2] - before[2]

    def forget(self) -> None:
        """No step goes on: keeps no weight alive."""
        self._weights = []

    def end(self, *, bad: bool) -> None:
        """The step is over; ``bad``: it went wrong, was skipped, or has moved nothing."""
        self._alert = max(self._alert - 1, 0)
        if self._changes:
            self._clipped.add(self._after_backward)
        if bad or self.emptied:
            self._alert = max(self._alert, ALERT_STEPS)
        elif self.is_awake and not self._missed:
            done = self._way, self._program
            self._settled[self._is_traced] = done in self._programs
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
                self._programs.clear()
                self._clipped.clear()
            self._known.update(self._gone)
            self._programs.add(done)
            self._good += 1
        self.emptied = False
