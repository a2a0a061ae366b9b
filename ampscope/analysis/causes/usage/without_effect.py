"""What is said of loops that run and change nothing: no weight moves, no rank hears of another, no op is in half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import Occurrence, Reason
from ampscope.trace.vocabulary import MistakeForm


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutEffect(Reason):
    """What capture saw of it."""

    form: MistakeForm | None = None
    parameters: tuple[str, ...] = ()  #: the first of those concerned
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
        named = ", ".join(self.parameters[:3]) + (", ..." if self.count > 3 else "")
        what = "parameter" if self.count == 1 else f"{self.count:,} parameters"
        return f"{what} ({named})" if named else "parameters"


_STILL: dict[MistakeForm | None, Callable[[WithoutEffect], str]] = {
    None: lambda _: "The optimizer steps, and trains nothing.",
    MistakeForm.ALL_FROZEN: lambda seen: (
        f"All of the optimizer's {seen.whose} have requires_grad=False, so its first {seen.attempts:,} steps moved "
        "nothing."
    ),
    MistakeForm.NO_GRADIENT: lambda seen: (
        f"No gradient reached the optimizer's {seen.whose} in its first {seen.attempts:,} steps: the loss has no "
        "history that leads to them. detach(), .data, .item(), NumPy or torch.no_grad() on the way cuts it off."
    ),
    MistakeForm.ZERO_GRADIENTS: lambda seen: (
        f"Every gradient of the optimizer's {seen.whose} was exactly zero in its first {seen.attempts:,} steps, as "
        "backward gave it: the loss does not depend on them, or is multiplied by zero."
    ),
    MistakeForm.GRADIENTS_ZEROED: lambda seen: (
        f"Backward gives the optimizer's {seen.whose} gradients, but they are zero or gone when it steps, in its first "
        f"{seen.attempts:,} steps: a line between backward and the step clears them, or multiplies them by zero, as "
        "1 / norm does if the norm is infinite."
    ),
    MistakeForm.OTHER_PARAMETERS: lambda seen: (
        f"The optimizer that steps holds other parameters than the watched model's {seen.whose}: backward gives "
        "gradients to the model's, and the optimizer's own have none. It was made for a copy of the model, or before "
        "the model got its present parameters."
    ),
    MistakeForm.ROUNDED_AWAY: lambda seen: (
        f"The optimizer's {seen.whose} get gradients, and after {seen.attempts:,} steps all of them are as they were, "
        "to the last bit: the updates are so small that adding them changes nothing."
    ),
    MistakeForm.NO_LEARNING_RATE: lambda seen: (
        f"The learning rate was exactly zero in all of the {seen.attempts:,} steps, so no weight has moved."
    ),
}


def nothing_trains(occurrence: Occurrence) -> str:
    """Why no weight moves."""
    seen = _seen(occurrence)
    return _STILL.get(seen.form, _STILL[None])(seen)


def not_cleared(occurrence: Occurrence) -> str:
    """How long gradients have been added up."""
    seen = _seen(occurrence)
    since = f" for {seen.attempts:,} steps" if seen.attempts else ""
    return (
        f"Backward adds to gradients, and nothing has cleared them{since}: each step is made with the sum of the "
        "gradients of all batches so far, most of which belong to weights that are long gone."
    )


def not_reduced(occurrence: Occurrence) -> str:
    """Which parameters a wrapper does not know."""
    seen = _seen(occurrence)
    others = f" of {seen.ranks:,} ranks" if seen.ranks else ""
    return (
        f"DistributedDataParallel was built with other parameters than the model's {seen.whose}, so backward does not "
        f"reduce their gradients{others}: each rank trains on its own data alone, and their weights part. The "
        "parameters were put there after the model was wrapped, as conversions, new layers and moves to another "
        "device do."
    )


def amp_without_effect(occurrence: Occurrence) -> str:
    """Why no op runs in half precision, and in which dtypes they ran."""
    seen = _seen(occurrence)
    scaler = ", and so is the GradScaler" if seen.scaler_is_off else ""
    told: dict[MistakeForm | None, str] = {
        MistakeForm.AUTOCAST_SWITCHED_OFF: (
            f"The autocast region is for CUDA, which is not available: torch has switched the region off{scaler}."
        ),
        MistakeForm.AUTOCAST_ELSEWHERE: f"The autocast region is for {seen.device}; the model is on {seen.tensors}.",
        MistakeForm.AUTOCAST_OUTSIDE: (
            "No op of the model ran inside an autocast region that is on: there is none, it was made with "
            "enabled=False, or it is left before the model is called."
        ),
        MistakeForm.AUTOCAST_FLOAT32: "Of what runs inside the autocast region autocast casts nothing.",
    }
    why = told.get(seen.form, "Autocast or a GradScaler was asked for.")
    total = sum(count for _, count in seen.ops)
    shares = ", ".join(f"{count / total:.0%} in {dtype}" for dtype, count in seen.ops) if total else ""
    ran = f"Of {total:,} ops in the traced steps none ran in half precision: {shares}." if total else ""
    return f"{why} {ran or 'No op runs in half precision.'}"


def _seen(occurrence: Occurrence) -> WithoutEffect:
    return occurrence.reason if isinstance(occurrence.reason, WithoutEffect) else WithoutEffect()
