"""The protocol that all that is heard of a run must match, whatever its loop: each rule yields its breaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch.optim.optimizer import Optimizer

from ampscope.capture.events import ScalerMethod, StepAttempt
from ampscope.capture.step.cycle import TRANSITIONS, Moment, State
from ampscope.capture.step.observers import ORDER
from tests.integration.step_order.heard import CYCLE, ENTERS, LEAVES, LOOP, TORCH, Heard, Log, Trained

_OPEN = {State.FORWARD, State.GRADIENTS_READY}
_COMPLETE = {State.GRADIENTS_READY, State.IDLE}  # IDLE where another optimizer has ended the step already
#: The states in which the loop may come by an event; what is not here may come up in any but `State.JUDGING`.
STATES: dict[str, set[State]] = {
    "step_began": {State.FORWARD},
    "call_began": {State.FORWARD},
    "call_ended": {State.FORWARD},
    "call_lost": {State.FORWARD},
    "backward_began": _OPEN,
    "backward_ended": {State.FORWARD},
    "gradients_complete": {State.GRADIENTS_READY},
    "attempt_began": _COMPLETE,
    "bare_step": _COMPLETE,
    "optimizer_steps": {State.STEPPING},
    "foreign_step": _OPEN,
    "step_ended": _COMPLETE,
}
#: Events of which the loop tells as soon as the cycle has had a moment, and the moment.
AFTER = {
    "step_began": Moment.BEGINS,
    "call_began": Moment.CALLS,
    "backward_ended": Moment.RUNS_BACKWARD,
    "gradients_complete": Moment.HAS_GRADIENTS,
}
#: Told only where they have led to another state; the others whenever they come.
_MOVES = {Moment.BEGINS, Moment.HAS_GRADIENTS}
#: What begins, and what it ends by.
SPANS = {
    "call_began": {"call_ended", "call_lost"},
    "backward_began": {"backward_ended", "abandoned"},
    "scaler_call_began": {"scaler_call_ended", "scaler_call_lost"},
    "attempt_began": {"step_ended"},
}
_ENDS = set[str]().union(*SPANS.values()) - {"abandoned"}
#: Spans inside which nothing else comes up.
_CLOSED = ("call_began", "backward_began")
#: Ends after the scaler's call in which it began, where no hook tells that the optimizer has stepped.
_MAY_LAST = "attempt_began"
#: Comes up outside of all spans: whether the step before it was skipped is known by then.
_OUTSIDE = "scheduler_stepped"


def violations(log: Log) -> list[str]:
    """Everything in ``log`` that is against the protocol; empty for a run as it should be."""
    return [breach for rule in RULES for breach in rule(log)]


def assert_protocol(trained: Trained) -> None:
    """What was heard of each run matches the protocol, and no optimizer's step went unheard."""
    assert {number: breaches for number, log in enumerate(trained.logs) if (breaches := violations(log))} == {}
    assert any("step_began" in {heard.what for heard in log.events()} for log in trained.logs)
    assert sum(map(steps_told, trained.logs)) == trained.steps


def steps_told(log: Log) -> int:
    """How many steps of torch's optimizers the run knows of: in attempts, outside of them, and of other models."""
    attempts = [heard.about.attempt for heard in log.events() if heard.what == "step_ended"]
    late = [heard for heard in log.events() if heard.what == "bare_step" and heard.about.late]
    others = [heard for heard in log.events() if heard.what == "foreign_step"]
    return len(late) + len(others) + sum(each.stepped and isinstance(each.optimizer, Optimizer) for each in attempts)


def each_part_hears_in_order(log: Log) -> Iterator[str]:
    """Of an event all hear that are to, in the order of `ORDER`, and nobody else; events may nest."""
    waiting: list[tuple[str, list[str]]] = []
    for heard in log:
        if heard.who == LOOP:
            waiting.append((heard.what, [part for part in ORDER[heard.what].split() if part in log.parts]))
        elif heard.who not in (CYCLE, TORCH):
            event, parts = waiting[-1] if waiting else ("nothing", [])
            if (heard.what, heard.who) != (event, parts[0] if parts else ""):
                yield f"{heard.who} hears of {heard.what}, and of {event} {parts} are still to hear"
            else:
                parts.pop(0)
        while waiting and not waiting[-1][1]:
            waiting.pop()
    yield from (f"{parts} have not heard of {event}" for event, parts in waiting)


def the_cycle_moves_by_its_table(log: Log) -> Iterator[str]:
    """Each moment leads where `TRANSITIONS` says; what a step is inside of is left in turn; nothing else moves it."""
    state, inside = State.IDLE, list[State]()
    for heard in log:
        if heard.who != CYCLE:
            if heard.state is not (inside[-1] if inside else state):
                yield f"{heard.what} finds the step in {heard.state.name}, which {state.name}, {inside} has become"
        elif heard.what == ENTERS:
            inside.append(heard.about)
        elif heard.what == LEAVES:
            if not inside or inside.pop() is not heard.about:
                yield f"{heard.about.name} is left before what is inside of it"
        else:
            due = TRANSITIONS[state].get(Moment[heard.what], state)
            if (heard.about, heard.state) != (state, due):
                yield f"{heard.what} leads from {heard.about.name} to {heard.state.name}; due: {due.name}"
            state = heard.state
    if inside:
        yield f"the run ends inside {inside}"


def events_come_in_their_states(log: Log) -> Iterator[str]:
    for heard in log.events():
        if heard.state not in STATES.get(heard.what, set(State) - {State.JUDGING}):
            yield f"{heard.what} comes up in {heard.state.name}"


def moments_are_told(log: Log) -> Iterator[str]:
    """What `AFTER` has follows its moment at once, and nothing else does; a step that is told to have ended ends."""
    moves = [heard for heard in log if heard.who == LOOP or (heard.who == CYCLE and heard.what in Moment.__members__)]
    for before, heard in pairwise([None, *moves, None]):
        moment = Moment[before.what] if before is not None and before.who == CYCLE else None
        if moment in _MOVES and before is not None and before.about is before.state:
            moment = None
        name = heard.what if heard is not None else "the end"
        due = next((event for event, after in AFTER.items() if after is moment), None)
        if due is not None and name != due:
            yield f"{name} comes up, and {due} was due"
        if name in AFTER and AFTER[name] is not moment:
            yield f"{name} is told, and there was no {AFTER[name].name}"
        if (name == Moment.ENDS.name) != (before is not None and before.what == "step_ended"):
            yield f"{name} comes after {before.what if before is not None else 'nothing'}"


def what_begins_ends(log: Log) -> Iterator[str]:
    """Calls, backwards, scaler calls and attempts end as what they began as, or an exception has broken them off."""
    begun: list[tuple[str, Any]] = []
    for heard in log.events():
        about = heard.about.attempt if heard.what == "step_ended" else heard.about
        inside = begun[-1][0] if begun else ""
        if heard.what in SPANS:
            if inside in _CLOSED:
                yield f"{heard.what} inside {inside}"
            if heard.what == _MAY_LAST and not _is_around(begun, about):
                yield "an attempt through a scaler begins outside of the scaler's step"
            begun.append((heard.what, about))
            continue
        if heard.what == _OUTSIDE and begun:
            yield f"{_OUTSIDE} inside {inside}"
        if heard.what == "abandoned":  # an exception goes through the loop: what it leaves is told of as it passes
            begun = [span for span in begun if span[0] == "scaler_call_began"]
        of = [at for at, (event, what) in enumerate(begun) if heard.what in SPANS[event] and _is(about, what)]
        if of:
            event, _ = begun.pop(of[-1])
            left = {inner for inner, _ in begun[of[-1] :]} - {_MAY_LAST}
            if left and event != _MAY_LAST:
                yield f"{event} ends before {left} inside of it"
        elif heard.what in _ENDS and not _is_foreign(heard):
            yield f"{heard.what} of what has not begun"
    yield from (f"{event} has no end" for event, _ in begun)


def _is(about: Any, what: Any) -> bool:
    """Whether an event is about what began, or says of nothing what it is about, as the end of a backward."""
    return about is None or about is what


def _is_around(begun: list[tuple[str, Any]], attempt: StepAttempt) -> bool:
    """Whether the scaler's ``step`` that makes an attempt has begun; True where no scaler makes it."""
    if attempt.scaling is None or attempt.handed is None:
        return True
    calls = [call for event, call in begun if event == "scaler_call_began"]
    return bool(calls) and calls[-1].method is ScalerMethod.STEP and calls[-1].argument is attempt.handed


def _is_foreign(heard: Heard) -> bool:
    """Whether a scaler steps another model's optimizer, of which only the end is told."""
    is_call = heard.what.startswith("scaler_call")
    return is_call and heard.about.method is ScalerMethod.STEP and heard.about.attempt is None


def optimizers_step_in_attempts(log: Log) -> Iterator[str]:
    """Whether told as it was: once before its optimizer writes, and before that as bare where no scaler steps it."""
    told: dict[str, list[StepAttempt]] = {"attempt_began": [], "optimizer_steps": []}
    bare: list[Any] = []
    for before, heard in pairwise([None, *log.events()]):
        if heard is None:
            continue
        if heard.what in told:
            if heard.what == "optimizer_steps" and not _among(told["attempt_began"], heard.about):
                yield "an optimizer steps without an attempt"
            if _among(told[heard.what], heard.about):
                yield f"{heard.what} twice"
            told[heard.what].append(heard.about)
        elif heard.what == "bare_step":
            bare.append(heard.about.optimizer)
            if not heard.about.late and (before is None or before.what != "attempt_began"):
                yield "a bare step is told of no attempt"
        elif heard.what == "step_ended":
            attempt = heard.about.attempt
            steps = attempt.stepped and not attempt.late and isinstance(attempt.optimizer, Optimizer)
            if steps and not _among(told["optimizer_steps"], attempt):
                yield "an optimizer has stepped, and nobody was told before"
            if (
                attempt.scaling is None
                and isinstance(attempt.optimizer, Optimizer)
                and not _among(bare, attempt.optimizer)
            ):
                yield "an optimizer has stepped without a scaler, and nobody was told"


def others_step_in_open_steps(log: Log) -> Iterator[str]:
    """Of an optimizer that holds nothing of the models is told as torch has it step, once, while a step is open."""
    models = [heard.about.module for heard in log.events() if heard.what == "call_began"]
    held = {id(parameter) for model in models for parameter in model.parameters()}
    nothing = Heard("", "", State.IDLE)
    for before, heard in pairwise([nothing, *log, nothing]):
        is_told = (heard.who, heard.what) == (LOOP, "foreign_step")
        steps = before.who == TORCH
        if is_told and not (steps and before.about is heard.about):
            yield "foreign_step is told, and torch has no such optimizer step"
        if is_told and _holds(heard.about, held):
            yield "foreign_step is told of an own optimizer"
        if steps and not is_told and before.state in _OPEN and not _holds(before.about, held):
            yield "another model's optimizer steps, and nobody was told"


def _holds(optimizer: Optimizer, parameters: set[int]) -> bool:
    return any(id(each) in parameters for group in optimizer.param_groups for each in group["params"])


def schedules_are_of_own_optimizers(log: Log) -> Iterator[str]:
    others = [heard.about for heard in log.events() if heard.what == "foreign_step"]
    for heard in log.events():
        if heard.what == "scheduler_stepped" and _among(others, heard.about.optimizer):
            yield "scheduler_stepped is told of another model's optimizer"


def regions_stay_switched_off(log: Log) -> Iterator[str]:
    """What torch has switched off of a kind of device is on in no step."""
    off = set[str]()
    for heard in log.events():
        if heard.what == "region_switched_off":
            off.add(heard.about)
        elif heard.what == "step_began":
            on = {region.device_type for region in heard.about.ambient.regions if region.enabled}
            yield from (f"a step begins in a region for {device}, which is switched off" for device in on & off)


def _among(these: list[Any], one: object) -> bool:
    return any(each is one for each in these)


def scalers_join_before_they_are_called(log: Log) -> Iterator[str]:
    joined: list[Any] = []
    for heard in log.events():
        if heard.what == "scaler_joined":
            if _among(joined, heard.about.scaler):
                yield "a scaler joins twice"
            joined.append(heard.about.scaler)
        elif heard.what.startswith("scaler_call") and not _among(joined, heard.about.scaler):
            yield f"{heard.what} of a scaler that has not joined"


def a_run_ends_once(log: Log) -> Iterator[str]:
    """Nothing comes after its end."""
    events = [heard.what for heard in log.events()]
    if "run_ended" not in events:
        yield "the run has no end"
    else:
        yield from (f"{event} after the run has ended" for event in events[events.index("run_ended") + 1 :])


RULES: tuple[Callable[[Log], Iterator[str]], ...] = (
    each_part_hears_in_order,
    the_cycle_moves_by_its_table,
    events_come_in_their_states,
    moments_are_told,
    what_begins_ends,
    optimizers_step_in_attempts,
    others_step_in_open_steps,
    schedules_are_of_own_optimizers,
    regions_stay_switched_off,
    scalers_join_before_they_are_called,
    a_run_ends_once,
)
