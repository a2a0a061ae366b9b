"""Plain words for what the files hold as identifiers and scales: terminal, app and report say the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampscope.analysis.results import Finding, Incident
from ampscope.cures.forms.whole_step import OF_GROWTH
from ampscope.numerals import number
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, Node, ReplayStatus
from ampscope.trace.vocabulary import SEEN_LIVE

_RAISED = str.maketrans(
    "0123456789-",
    "\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}"
    "\N{SUPERSCRIPT FIVE}\N{SUPERSCRIPT SIX}\N{SUPERSCRIPT SEVEN}\N{SUPERSCRIPT EIGHT}\N{SUPERSCRIPT NINE}"
    "\N{SUPERSCRIPT MINUS}",
)


def power_of_two(exponent: int) -> str:
    """``2`` with a raised exponent."""
    return f"2{str(exponent).translate(_RAISED)}"


#: Powers of two up to this one are written whole: a scale is doubled and halved, which is seen of all its digits.
_WHOLE = 31


def in_words(scale: float) -> str:
    """A loss scale for people: ``8,192 (2¹³)``."""
    if scale <= 0 or not math.isfinite(scale):
        return number(scale)
    exponent = math.log2(scale)
    if exponent != int(exponent):
        return number(scale)
    written = f"{int(scale):,}" if 0 <= exponent <= _WHOLE else number(scale)
    return f"{written} ({power_of_two(int(exponent))})"


def capitalized(text: str) -> str:
    """The text with its first letter raised, and all others as they are."""
    return text[:1].upper() + text[1:]


def times(count: int) -> str:
    """``once``, ``twice``, ``5 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def listed(names: Sequence[str], most: int | None = None, one: str = "") -> str:
    """``a``, ``a and b``, ``a, b and 4 more modules``: of more than ``most`` names the first, and how many more."""
    more = 0 if most is None else len(names) - most
    named = [*names[:most], *([counted(more, f"more {one}") if one else f"{more:,} more"] if more > 0 else [])]
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))


def counted(number: int, one: str) -> str:
    """``1 op``, ``3 ops``, ``2 batches``, ``4 kinds of op``."""
    if number == 1:
        return f"{number:,} {one}"
    noun, of, rest = one.partition(" of ")
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}{of}{rest}"


def spanned(noun: str, first: int, last: int) -> str:
    """``step 300``, ``steps 3,056 to 3,333``."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


#: Stretches of ranks that are named before the rest is only counted.
_NAMED = 4


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0 to 15 and 17``; of many stretches the first, and how many more."""
    stretches = _stretches(sorted(set(ranks)))
    named = [_stretch(first, last) for first, last in stretches[:_NAMED]]
    left = sum(last - first + 1 for first, last in stretches[_NAMED:])
    named += [f"{left:,} more"] if left else []
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed(named)}"


def where_ranked(item: Incident | Finding) -> str:
    """``on rank 1 of 2``, ``on ranks 3 and 4 of 8``, ``on all 8 ranks``; empty where there is one."""
    if item.world <= 1:
        return ""
    ranks = (item.rank, *item.also_on)
    if len(ranks) >= item.world:
        return "on both ranks" if item.world == 2 else f"on all {item.world:,} ranks"
    return f"on {ranks_in_words(ranks)} of {item.world:,}"


def first_ranked(item: Incident | Finding) -> str:
    """`where_ranked` without the ranks on which the same came later, which `further_in_words` tells."""
    if item.world <= 1 or 1 + len(item.also_on) >= item.world:
        return where_ranked(item)
    return f"on rank {item.rank:,} of {item.world:,}"


def further_in_words(item: Incident | Finding) -> str:
    """On which other ranks the same failed by itself, as a sentence; empty where it did on none, or on all."""
    if not item.also_on or 1 + len(item.also_on) >= item.world:
        return ""
    return f"The same failed by itself on {ranks_in_words(item.also_on)}."


def received_in_words(incident: Incident) -> str:
    """Who got the value from the rank where it was born, as a sentence; empty where nobody did."""
    got = incident.received_by
    if not got:
        return ""
    if len(got) > 1 and len(got) + 1 + len(incident.also_on) >= incident.world:
        return "Both other ranks received it." if len(got) == 2 else f"All {len(got):,} other ranks received it."
    words = ranks_in_words(got)
    return f"{capitalized(words)} received it."


def _stretch(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _stretches(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each stretch without a gap; two neighbours are no stretch."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    pairs = [[(first, first), (last, last)] if last == first + 1 else [(first, last)] for first, last in found]
    return [each for pair in pairs for each in pair]


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
    return told.replace("this step", "an earlier step") if kind in OF_GROWTH else told


def steps_in_words(item: Incident | Finding) -> str:
    """``step 3``, ``steps 3 to 90 (7 times)``, or ``from step 3 on`` where only the first time is known."""
    if isinstance(item, Finding) and not item.counted:
        return f"from step {item.step:,} on"
    if item.count <= 1 or item.last_step == item.step:
        return f"step {item.step:,}"
    return f"{spanned('step', item.step, item.last_step)} ({item.count:,} times)"


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
