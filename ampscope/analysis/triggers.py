"""One table says of each trigger of an incident how it is told, and whether each step is looked at for it."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.trace.schema import Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerWords:
    """How a trigger is told."""

    noticed: str  #: what was noticed first, a clause
    effect: str = "went wrong"  #: the verb of "Step 3 ..."
    tripped: str = "Gradients that were not finite"  #: a heading over the parameters that an incident names
    cured: str = "finite"  #: what a change came to that cures the step
    not_cured: str = "still not finite"  #: and one that does not
    each_step: bool = False  #: no step before can have had it unseen: each is looked at, or fails by it


_UNKNOWN = TriggerWords(noticed="")
_GRADIENTS_LOST = "Gradients that lost a part of themselves"

TRIGGERS: dict[str, TriggerWords] = {
    Trigger.NONFINITE_GRADIENT: TriggerWords(
        noticed="gradients were not finite",
        effect="had non-finite gradients",
        each_step=True,
    ),
    Trigger.NONFINITE_LOSS: TriggerWords(
        noticed="the loss was not finite",
        effect="had a non-finite loss",
        each_step=True,
    ),
    Trigger.NONFINITE_WEIGHT: TriggerWords(
        noticed="a weight was not finite after the step",
        effect="left non-finite weights",
        tripped="Weights that were not finite",
        each_step=True,
    ),
    Trigger.NONFINITE_BUFFER: TriggerWords(
        noticed="a buffer was not finite after the step",
        effect="left a non-finite buffer",
        tripped="Buffers that were not finite",
        each_step=True,
    ),
    Trigger.BUFFER_STANDS_STILL: TriggerWords(
        noticed="a buffer did not move, and in float32 it does",
        effect="left a buffer where it was",
    ),
    Trigger.UPDATES_LOST: TriggerWords(
        noticed="updates were rounded away, and in float32 they are not",
        effect="lost updates to rounding",
    ),
    Trigger.NONFINITE_STATE: TriggerWords(
        noticed="state that outlives the step was not finite after it",
        effect="met state that is not finite",
        tripped="State that was not finite",
    ),
    Trigger.NONFINITE_CARRIED: TriggerWords(
        noticed="a tensor that the loop carries from step to step was not finite",
        effect="left a tensor that the loop carries non-finite",
    ),
    Trigger.CARRIED_READ: TriggerWords(
        noticed="the step read a tensor of the loop's that was not finite",
        effect="read a non-finite tensor that the loop carries",
    ),
    Trigger.EXCEPTION: TriggerWords(
        noticed="an error ended the run",
        effect="was cut off by an error",
        each_step=True,
    ),
    Trigger.ABSORBED_OVERFLOW: TriggerWords(
        noticed="a value overflowed, and vanished again before loss and gradients",
        effect="computed with an overflow that nobody noticed",
        tripped=_GRADIENTS_LOST,
        cured="agrees with float32",
        not_cured="does not agree with float32",
    ),
    Trigger.INFORMATION_LOST: TriggerWords(
        noticed="a cast lost values that number something",
        effect="went on after a cast had lost values",
    ),
    Trigger.LOST_GRADIENT: TriggerWords(
        noticed="gradients lost what the same step has in float32",
        effect="lost gradients that float32 keeps",
        tripped=_GRADIENTS_LOST,
        cured="keeps its gradients",
        not_cured="still loses gradients",
    ),
}


def words_of(trigger: str) -> TriggerWords:
    """Returns how a trigger is told; nothing was noticed by one that this version does not know."""
    return TRIGGERS.get(trigger, _UNKNOWN)
