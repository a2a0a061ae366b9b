"""Chooses of which tensors a sampled step takes every statistic: what is near a limit always, the rest by turns."""

from __future__ import annotations

from ampscope.capture.tracing.sampling.selection import Selection

#: Outputs of ops that a step takes every statistic of, at most; and parameters, whose gradients and optimizer state
#: come with them.
MOST_OUTPUTS, MOST_PARAMETERS = 256, 16
#: Of these outputs, the part that may be near a limit.
_NEAR = 2


class Rotation:
    """The choice of one step after the other. It depends on what was measured alone.

    Args:
        selection: What is asked for; nothing else has a turn.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._turn = 0
        self._parts = 1
        self._near: frozenset[int] = frozenset()

    def chooses(self, site: int) -> bool:
        """Whether it is the turn of an op's site."""
        turn = site in self._near or (site - self._turn) % self._parts == 0
        return turn and self._selection.keeps(site)

    def parameters(self, names: list[str]) -> list[str]:
        """The parameters whose turn it is, of those that there are."""
        names = list(filter(self._selection.keeps_parameter, names))
        if len(names) <= MOST_PARAMETERS:
            return names
        first = self._turn * MOST_PARAMETERS % len(names)
        return (names + names)[first : first + MOST_PARAMETERS]

    def pass_on(self, outputs: int, nearest: list[int]) -> None:
        """The turn goes to others.

        Args:
            outputs: How many the step had.
            nearest: The sites that are near a limit, the nearest first.
        """
        self._near = frozenset(nearest[: MOST_OUTPUTS // _NEAR])
        room = MOST_OUTPUTS - min(len(nearest), MOST_OUTPUTS // _NEAR)
        self._parts = max(1, -(-outputs // room))
        self._turn += 1
