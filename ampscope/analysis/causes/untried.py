"""Why no replay has tried a piece of advice: what replays do not reach, whatever they are given."""

from __future__ import annotations

from ampscope.analysis.results import Remedy

#: Advice that replays try: theirs are limited.
TURN = "the replays that such steps get were used up before its turn"
LOOP = "a replay runs the calls of one step, not the loop around them"
MEANING = "it computes something else, where a replay keeps what is computed"
BEFORE = "it comes before the step, and a replay begins with what was there"
BATCH = "it comes before the step, and a replay begins with the batch as it was"
AHEAD = "nothing has failed yet on which a replay could try it"
SCALER = "it works over many steps, and a replay runs one"
OUTSIDE = "no change of the code cures it, and replays try such changes"
RANKS = "a replay runs the step of one rank"
RAISED = "a call that ends with an error is not run again"
COMPILED = "replays run eager code"
CONVERTED = "where the code converts to half precision itself, a replay widens what a call is given, not the call"
ORDER = "a replay takes the loop's own lines as they are"


def advice(why: str, text: str, code: str = "", kind: str = "") -> Remedy:
    """A piece of advice that no replay has tried, for one of these reasons."""
    return Remedy(text=text, code=code, kind=kind, untried=why)
