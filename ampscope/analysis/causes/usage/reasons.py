"""What was seen of usage mistakes whose sentence depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import Occurrence, Reason


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutEffect(Reason):
    """A loop runs and changes nothing: its fields are called as in the evidence of capture."""

    parameters: Sequence[str] = ()  #: the first of those concerned
    count: int = 0  #: of all of them
    attempts: int = 0  #: steps in which it was so
    ranks: int = 0
    device: str = ""  #: type of device that the region is for
    tensors: str = ""  #: types of device that the model is on
    scaler_is_off: bool = False
    ops: tuple[tuple[str, int], ...] = ()  #: of the traced steps, by the dtype that they gave

    @property
    def whose(self) -> str:
        """The parameters in words."""
        named = ", ".join(map(str, self.parameters[:3])) + (", ..." if self.count > 3 else "")
        what = "parameter" if self.count == 1 else f"{self.count:,} parameters"
        return f"{what} ({named})" if named else "parameters"

    @property
    def scaler(self) -> str:
        """What to add of the scaler where torch has switched a region off."""
        return ", and so is the GradScaler" if self.scaler_is_off else ""

    @property
    def ran(self) -> str:
        """The dtypes of the ops, in a sentence."""
        total = sum(count for _, count in self.ops)
        shares = ", ".join(f"{count / total:.0%} in {dtype}" for dtype, count in self.ops)
        ran = f"Of {total:,} ops in the traced steps none ran in half precision: {shares}."
        return ran if total else "No op runs in half precision."


def without_effect(text: str) -> Callable[[Occurrence], str]:
    """The sentence of a cause from a text that names fields of what was ``seen``."""
    return lambda occurrence: filled_in(text, occurrence.reason)


def filled_in(text: str, reason: Reason) -> str:
    """A text that may name fields of what was ``seen``, a `WithoutEffect`."""
    return text.format(seen=reason if isinstance(reason, WithoutEffect) else WithoutEffect())
