"""Plain words for the vocabulary of a diagnosis: what every view puts where the files hold an identifier."""

from __future__ import annotations

from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.words.rank_words import where_ranked
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, Form, Node, ReplayStatus, Trigger
from ampscope.trace.vocabulary import SEEN_LIVE

_TRIGGERS: dict[str, str] = {
    Trigger.NONFINITE_GRADIENT: "gradients were not finite",
    Trigger.NONFINITE_LOSS: "the loss was not finite",
    Trigger.NONFINITE_WEIGHT: "a weight was not finite after the step",
    Trigger.NONFINITE_BUFFER: "a buffer was not finite after the step",
    Trigger.BUFFER_STANDS_STILL: "a buffer did not move, and in float32 it does",
    Trigger.UPDATES_LOST: "updates were rounded away, and in float32 they are not",
    Trigger.NONFINITE_STATE: "state that outlives the step was not finite after it",
    Trigger.NONFINITE_CARRIED: "a tensor that the loop carries from step to step was not finite",
    Trigger.CARRIED_READ: "the step read a tensor of the loop's that was not finite",
    Trigger.EXCEPTION: "an error ended the run",
    Trigger.ABSORBED_OVERFLOW: "a value overflowed, and vanished again before loss and gradients",
    Trigger.INFORMATION_LOST: "many different values became few in a cast",
    Trigger.LOST_GRADIENT: "gradients lost what the same step has in float32",
}

_REPLAYS: dict[str, str] = {
    ReplayStatus.EXACT: "The step was run again and came out the same in all that is compared: what failed, and a "
    "sample of what each call returned.",
    ReplayStatus.DIVERGED: "The step was run again but came out differently: read this with care.",
    ReplayStatus.NOT_REPRODUCED: "The step was run again and did not fail: it depends on something outside the step.",
    ReplayStatus.RECEIVED: "The step was run again and this rank's own part of it did not fail.",
    ReplayStatus.UNAVAILABLE: "The step could not be run again.",
}

_TRIALS: dict[bool | None, str] = {
    True: "tried on this step: cures it",
    False: "tried on this step: does not cure it",
    None: "not tried on this step",
}


def trigger_in_words(trigger: str) -> str:
    """What was noticed first; empty for a trigger that this version does not know."""
    return _TRIGGERS.get(trigger, "")


def replay_in_words(incident: Incident) -> str:
    """How far what is shown can be trusted, in one or two sentences."""
    if not incident.replay and incident.traced:
        return "The ops of this step were being recorded as it ran."
    if incident.replay_reason == SEEN_LIVE:
        return f"It was {SEEN_LIVE}."
    text = _REPLAYS.get(incident.replay, "")
    reason = incident.replay_reason.strip().rstrip(".")
    return f"{text} Reason: {reason}." if text and reason else text


def trial_in_words(verified: bool | None, kind: str = "") -> str:
    """Whether a replay tried a remedy, and what came out."""
    told = _TRIALS[verified]
    return told.replace("this step", "an earlier step") if kind in (Form.SMALLER_STEP, Form.CLIPPED) else told


def steps_in_words(item: Incident | Finding) -> str:
    """``step 3``, ``steps 3 to 90 (7 times)``, or ``from step 3 on`` where only the first time is known."""
    if isinstance(item, Finding) and not item.counted:
        return f"from step {item.step:,} on"
    if item.count <= 1 or item.last_step == item.step:
        return f"step {item.step:,}"
    return f"steps {item.step:,} to {item.last_step:,} ({item.count:,} times)"


def when_in_words(item: Incident | Finding) -> str:
    """`steps_in_words`, and on which rank where there are several: ``step 3 on rank 1 of 2, the loop's step 1``."""
    of_loop = f", the loop's step {item.loop_step:,}" if item.loop_step is not None else ""
    return " ".join(filter(None, (steps_in_words(item), where_ranked(item)))) + of_loop


def op_in_words(op: str) -> str:
    """``bmm`` for ``aten.bmm.default``, ``a cast`` for that to another dtype; ``allreduce``; ``an input``."""
    if op == "aten._to_copy.default":
        return "a cast"
    if op.startswith("aten."):
        return op.removeprefix("aten.").rsplit(".", 1)[0].strip("_")
    library, _, name = op.partition(".")
    if library in COLLECTIVE_LIBRARIES:
        return name.partition(".")[0].strip("_").removesuffix("_base")
    return f"an {op}" if op[:1] in "aeiou" else f"a {op}"


#: What the trace calls an operand that no one else named.
_OPERAND_OF = "an operand of "
_NODES: dict[str, str] = {
    Node.INPUT: "input {name}",
    Node.PARAMETER: "parameter {name}",
    Node.BUFFER: "buffer {name}",
    Node.CARRIED: "tensor {name} of the loop",
    Node.LOSS: "the loss",
    Node.GRADIENT: "the gradient of {name}",
    Node.STATE_AFTER: "{name} after the step",
    Node.WEIGHT_AFTER: "{name} after the step",
    Node.BUFFER_AFTER: "{name} after the step",
    Node.CARRIED_AFTER: "{name} after the step",
}


def place_in_words(op: str, name: str = "") -> str:
    """``bmm``; of a `Node` with its name what it stands for: ``the gradient of fc.weight``, ``an input of mul``."""
    if op not in _NODES or not name:
        return op_in_words(op)
    if name.startswith(_OPERAND_OF):
        return f"an input of {op_in_words(name.removeprefix(_OPERAND_OF))}"
    return _NODES[op].replace("{name}", name)
