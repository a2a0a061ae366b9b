"""What was seen of usage mistakes whose sentence depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfState(Reason):
    """Parameters and optimizer state are half precision."""

    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateMoved(Reason):
    """The learning rate moved on after skipped steps."""

    steps: int  #: how many; 0: none that shows in the rates
    of: int  #: attempts
    matters: bool  #: whether they are more than a few of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleForgotten(Reason):
    """A new scaler took the place of one whose scale the run had found."""

    was: float
    starts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRestored(Reason):
    """An optimizer with a past is stepped by a scaler without one."""

    steps: int  #: of the optimizer's past
