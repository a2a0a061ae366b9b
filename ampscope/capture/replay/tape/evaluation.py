"""One evaluation of a step: its forwards and backwards on one set of weights, which is what can be run again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampscope.capture.replay.tape.weight_writes import Update
from ampscope.capture.torch_support.communication.process_group import collectives_so_far
from ampscope.capture.torch_support.models import Models

#: Calls without a backward, and micro-batches without an optimizer step, whose inputs are kept alive.
MOST_CALLS = 64


@dataclass(slots=True)
class Evaluation:
    """Holds what is known of the present evaluation; most steps are made of one.

    A step that moves weights and calls the model again (SAM, LBFGS) has several, and each is judged before its weights
    move: nothing of it could be run again afterwards.
    """

    since: int  #: position on the tape where it begins
    earlier: bool = False  #: the step had another before it
    after_unjudged: bool = False  #: weights were moved in this step before AMPscope could look at what moved them
    had_gradients: frozenset[str] = frozenset()  #: parameters that had one before its first backward
    wrapped: bool = False  #: a call of it ran in a wrapper that reduces gradients by itself
    collectives: int | None = 0  #: that had run before its first backward; None: not known
    calls: int = 0  #: of watched modules since the last backward
    backwards: int = 0
    moved: bool = False  #: the weights have been moved since: the next call begins another evaluation
    updates: list[Update] = field(
        default_factory=list
    )  #: by which the loop is about to move weights, while it is judged
    judged: bool = False  #: its gradients were looked at while its weights were still there
    versions: dict[int, list[int]] = field(default_factory=dict)  #: module -> counters of its weights after its call

    def takes_call(self) -> bool:
        """Counts a call of a watched module; returns whether its inputs can be kept beside those of the others."""
        self.calls += 1
        fits = max(self.calls, self.backwards) <= MOST_CALLS
        self.calls = self.calls if fits else 0
        return fits

    def backward_begins(self, models: Models) -> bool:
        """Notes what is there before a backward; returns whether it is not what an earlier one has left."""
        held = (name for name, parameter in models.parameters.values() if parameter.grad is not None)
        if self.backwards:
            return next(held, None) is None
        self.had_gradients, self.collectives = frozenset(held), self.collectives_now()
        return False

    def collectives_now(self) -> int | None:
        """How many have run; not asked where a wrapper is known to reduce gradients, for asking takes its time."""
        return 0 if self.wrapped else collectives_so_far()

    def collectives_run(self) -> int | None:
        """How many have run since its first backward began; None: not known."""
        now = self.collectives_now()
        return now - self.collectives if now is not None and self.collectives is not None else None

    def another(self, since: int) -> Evaluation:
        """The evaluation of the same step that begins at ``since``, on other weights."""
        return Evaluation(since, earlier=True, after_unjudged=self.after_unjudged or not self.judged)
