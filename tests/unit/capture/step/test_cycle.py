"""The states of a step: each way there is, and that anything else leaves a step where it was."""

from __future__ import annotations

import pytest

from ampscope.capture.step.cycle import TRANSITIONS, Moment, State, StepCycle

BEGIN, CALL, BACKWARD, EMPTY, READY, END = (
    Moment.BEGINS,
    Moment.CALLS,
    Moment.RUNS_BACKWARD,
    Moment.IS_EMPTY,
    Moment.HAS_GRADIENTS,
    Moment.ENDS,
)


@pytest.mark.parametrize(
    ("moments", "state"),
    [
        ([], State.IDLE),
        ([BEGIN, CALL], State.FORWARD),
        ([BEGIN, CALL, BACKWARD, CALL, BACKWARD], State.FORWARD),
        ([BEGIN, CALL, BACKWARD, READY], State.GRADIENTS_READY),
        ([BEGIN, CALL, BACKWARD, READY, READY, END], State.IDLE),
        ([BEGIN, CALL, BACKWARD, END], State.IDLE),
        ([BEGIN, EMPTY], State.IDLE),
        ([BEGIN, CALL, READY, CALL], State.FORWARD),  # an evaluation, or a further micro-batch, after unscaling
        ([BEGIN, CALL, READY, BACKWARD], State.FORWARD),
        ([READY, END], State.IDLE),  # a second optimizer steps when the first has ended the step
        ([CALL, BACKWARD], State.IDLE),
    ],
)
def test_a_step_goes_this_way(moments: list[Moment], state: State) -> None:
    cycle = StepCycle()
    for moment in moments:
        cycle.on(moment)
    assert cycle.state is state
    assert cycle.is_open == (state is not State.IDLE)
    assert not cycle.is_busy


def test_only_a_change_of_state_is_said_to_be_one() -> None:
    cycle = StepCycle()
    assert [cycle.on(moment) for moment in (READY, BEGIN, CALL, READY, READY, END, END)] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_every_end_counts_as_an_attempt() -> None:
    cycle = StepCycle()
    for moment in (BEGIN, END, END):
        cycle.on(moment)
    assert cycle.attempts == 2


def test_what_runs_inside_is_over_when_it_is_left() -> None:
    cycle = StepCycle()
    cycle.on(BEGIN)
    states: list[State] = []
    with pytest.raises(KeyError), cycle.inside(State.BACKWARD):
        assert (cycle.state, cycle.is_busy, cycle.is_open) == (State.BACKWARD, True, True)
        with cycle.inside(State.JUDGING):
            states.append(cycle.state)
        states.append(cycle.state)
        raise KeyError
    assert states == [State.JUDGING, State.BACKWARD]
    assert (cycle.state, cycle.is_busy) == (State.FORWARD, False)


def test_an_optimizer_may_be_left_without_having_begun() -> None:
    cycle = StepCycle()
    cycle.leave(State.STEPPING)
    cycle.enter(State.STEPPING)
    states = [cycle.state]
    cycle.leave(State.STEPPING)
    cycle.leave(State.STEPPING)
    assert [*states, cycle.state] == [State.STEPPING, State.IDLE]


def test_every_open_state_can_be_ended() -> None:
    assert {state for state in TRANSITIONS if END in TRANSITIONS[state]} == {State.FORWARD, State.GRADIENTS_READY}


def test_what_comes_from_outside_goes_on_out_of_a_state_that_was_cleared() -> None:
    cycle = StepCycle()
    with pytest.raises(KeyboardInterrupt), cycle.inside(State.BACKWARD):
        cycle.start_afresh()
        raise KeyboardInterrupt
    assert not cycle.is_busy
