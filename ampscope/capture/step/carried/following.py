"""Decides whether a loop is listened to between its steps: in the first, and on where steps read what it carries."""

from __future__ import annotations

import itertools

from ampscope.capture.replay.tape.routine import FIRST_STEPS
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.communication.sharded_models import obstacle_to_replay
from ampscope.capture.torch_support.models import Models

#: The first steps, in which is learned whether the loop carries anything; learned again around powers of two.
LEARNED_STEPS = 3
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
        self._early = True
        self._alert = 0  # steps for which it goes on
        self._obstacle = (-1, "")  # to following, as of that revision of the models

    def step_ended(self, number: int, *, bad: bool) -> None:
        """Updates what is followed after a step has ended; ``number`` says how many have."""
        self._alert = ALERT_STEPS if bad else max(self._alert - 1, 0)
        self._early = number < FIRST_STEPS
        self.learning = number <= LEARNED_STEPS or not number & (number - 1) or not (number - 1) & (number - 2)

    def is_on(self, *, carries: bool, suspects: bool) -> bool:
        """Whether steps, and what the loop does between them, are followed.

        Args:
            carries: The loop is known to carry something.
            suspects: Something is there that the loop made inf or NaN, and that no step has read yet.
        """
        patience = PATIENCE_WITH_BAD if suspects else PATIENCE
        return self.learning or self._alert > 0 or ((carries or suspects) and self.idle < patience)

    def hears(self, calls: int, *, suspects: bool) -> bool:
        """Whether a loop that is followed is listened to now, too: a long program is known, and costs much to hear.

        Args:
            calls: That the loop made when it was listened to last.
            suspects: As for `is_on`.
        """
        return self._early or self.learning or self._alert > 0 or suspects or calls <= MOST_HEARD

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
