"""What every part hears of a step matches the protocol, whatever the loop; and what is against it would be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ampscope.capture.events import StepObserver
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.step import observers
from ampscope.capture.step.observers import ORDER, Observers
from ampscope.capture.step.step_watch import StepWatch
from tests.integration.step_order import loops
from tests.integration.step_order.heard import CYCLE, LOOP, Log, train
from tests.integration.step_order.loops import LOOPS
from tests.integration.step_order.protocol import assert_protocol, violations

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*CUDA is not available:UserWarning",
    "ignore:Detected call of `lr_scheduler.step",
)

# -- every loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_told_by_the_protocol(name: str, run_folder: Path) -> None:
    assert_protocol(train(LOOPS[name], run_folder))


# -- five of them in full ---------------------------------------------------------------------------------------------

#: A step of the recipe: what a scaler does in its own ``step`` comes up inside of it.
A_GOOD_STEP = """
IDLE             scaler_joined
FORWARD          step_began
FORWARD          call_began
FORWARD          call_ended
FORWARD          scaler_call_began scale
FORWARD          scaler_call_ended scale
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
GRADIENTS_READY  gradients_complete
GRADIENTS_READY  scaler_call_began step
GRADIENTS_READY  attempt_began
GRADIENTS_READY  scaler_call_began unscale_
GRADIENTS_READY  scaler_call_ended unscale_
enters STEPPING
STEPPING         optimizer_steps
leaves STEPPING
GRADIENTS_READY  step_ended
IDLE             scaler_call_ended step
IDLE             scaler_call_began update
IDLE             scaler_call_ended update
IDLE             abandoned
IDLE             run_ended
"""

#: No optimizer steps; the step is replayed before it ends.
A_SKIPPED_STEP = A_GOOD_STEP.replace(
    """enters STEPPING
STEPPING         optimizer_steps
leaves STEPPING
""",
    """enters JUDGING
leaves JUDGING
""",
)

#: Two micro-batches make one step; gradients are complete at the loop's own ``unscale_``, before it clips.
ACCUMULATED_AND_CLIPPED = """
IDLE             scaler_joined
FORWARD          step_began
FORWARD          call_began
FORWARD          call_ended
FORWARD          scaler_call_began scale
FORWARD          scaler_call_ended scale
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
FORWARD          call_began
FORWARD          call_ended
FORWARD          scaler_call_began scale
FORWARD          scaler_call_ended scale
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
GRADIENTS_READY  gradients_complete
GRADIENTS_READY  scaler_call_began unscale_
GRADIENTS_READY  scaler_call_ended unscale_
GRADIENTS_READY  scaler_call_began step
GRADIENTS_READY  attempt_began
enters STEPPING
STEPPING         optimizer_steps
leaves STEPPING
GRADIENTS_READY  step_ended
IDLE             scaler_call_ended step
IDLE             scaler_call_began update
IDLE             scaler_call_ended update
IDLE             abandoned
IDLE             run_ended
"""

#: The optimizer calls it twice within one step: the attempt begins as it first returns, and ends with the optimizer.
A_CLOSURE = """
FORWARD          step_began
FORWARD          call_began
FORWARD          call_ended
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
GRADIENTS_READY  gradients_complete
GRADIENTS_READY  attempt_began
GRADIENTS_READY  bare_step
enters STEPPING
STEPPING         optimizer_steps
leaves STEPPING
FORWARD          call_began
FORWARD          call_ended
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
GRADIENTS_READY  gradients_complete
enters STEPPING
leaves STEPPING
GRADIENTS_READY  step_ended
IDLE             abandoned
IDLE             run_ended
"""

#: What comes between a step's own events: of the loop's region, of another model's optimizer, of a scheduler.
BESIDE_ANOTHER = """
IDLE             region_switched_off
FORWARD          step_began
FORWARD          call_began
FORWARD          call_ended
FORWARD          backward_began
enters BACKWARD
leaves BACKWARD
FORWARD          backward_ended
FORWARD          foreign_step
GRADIENTS_READY  gradients_complete
GRADIENTS_READY  attempt_began
GRADIENTS_READY  bare_step
enters STEPPING
STEPPING         optimizer_steps
leaves STEPPING
GRADIENTS_READY  step_ended
IDLE             scheduler_stepped
IDLE             abandoned
IDLE             run_ended
"""
if torch.cuda.is_available():
    BESIDE_ANOTHER = BESIDE_ANOTHER.replace("IDLE             region_switched_off\n", "")


ORDERS: dict[Callable[[Any], Any], str] = {
    loops.one_good_step: A_GOOD_STEP,
    loops.one_skipped_step: A_SKIPPED_STEP,
    loops.accumulated_and_clipped: ACCUMULATED_AND_CLIPPED,
    loops.one_closure: A_CLOSURE,
    loops.beside_another: BESIDE_ANOTHER,
}


@pytest.mark.parametrize(("loop", "order"), ORDERS.items())
def test_a_step_is_told_in_this_order(loop: Callable[[Any], Any], order: str, run_folder: Path) -> None:
    (log,) = train(loop, run_folder).logs
    assert log.told() == order.strip()


# -- what is against it -----------------------------------------------------------------------------------------------

#: Told wherever something is given up, at the end of a run too: once more or less is nobody's breach.
AT_ANY_TIME = {"abandoned"}
#: As often as the loop makes a region or has a schedule step, of which nothing else in the log tells.
AS_OFTEN_AS_MADE = {"region_switched_off", "scheduler_stepped"}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    """Of the loops whose order is written out, what is told as it should be."""
    return [log for loop in ORDERS for log in train(loop, tmp_path_factory.mktemp("runs")).logs]


def _made(log: Log, entries: list[Any]) -> Log:
    made = Log(entries)
    made.parts = log.parts
    return made


def _spans(log: Log) -> Iterator[tuple[int, int]]:
    """Where each event comes up, and where the last part has heard of it."""
    for first, heard in enumerate(log):
        if heard.who == LOOP and heard.what not in AT_ANY_TIME:
            last = first + 1
            while last < len(log) and log[last].what == heard.what and log[last].who not in (LOOP, CYCLE):
                last += 1
            yield first, last


def test_an_event_that_is_lost_or_comes_twice_is_told(right: list[Log]) -> None:
    for log in right:
        for first, last in _spans(log):
            event = log[first].what
            if event in AS_OFTEN_AS_MADE:
                continue
            assert violations(_made(log, log[:first] + log[last:])), f"{event} lost"
            assert violations(_made(log, log[:last] + log[first:])), f"{event} twice"


def test_an_event_that_comes_too_early_is_told(right: list[Log]) -> None:
    for log in right:
        spans = list(_spans(log))
        for (earlier, _), (first, last) in pairwise(spans):
            moved = log[:earlier] + log[first:last] + log[earlier:first] + log[last:]
            assert violations(_made(log, moved)), f"{log[first].what} before {log[earlier].what}"


def test_a_part_that_hears_nothing_or_out_of_turn_is_told(right: list[Log]) -> None:
    for log in right:
        for first, last in _spans(log):
            for part in range(first + 1, last):
                assert violations(_made(log, log[:part] + log[part + 1 :])), f"{log[part]} lost"
            for part in range(first + 1, last - 1):
                swapped = [*log[:part], log[part + 1], log[part], *log[part + 2 :]]
                assert violations(_made(log, swapped)), f"{log[part]} after the next"
            stranger = log[first]._replace(who="scheduler")
            assert violations(_made(log, [*log[:last], stranger, *log[last:]])), f"a stranger hears of {stranger.what}"


def test_a_state_that_is_never_left_or_reached_otherwise_is_told(right: list[Log]) -> None:
    for log in right:
        for place, heard in enumerate(log):
            moves = heard.who == CYCLE and (heard.about is not heard.state)
            if moves:
                assert violations(_made(log, log[:place] + log[place + 1 :])), f"{heard} lost"


def test_what_comes_after_the_end_is_told(right: list[Log]) -> None:
    for log in right:
        (late,) = [heard for heard in log.events() if heard.what == "abandoned"]
        assert violations(_made(log, [*log, late]))
        assert violations(_made(log, [heard for heard in log if heard.what != "run_ended"]))


def test_parts_that_are_told_in_another_order_are_noticed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {**ORDER, "step_ended": ORDER["step_ended"].replace("trace audit rows", "rows audit trace")}
    monkeypatch.setattr(observers, "ORDER", swapped)
    (log,) = train(loops.one_good_step, run_folder).logs
    assert any("rows hears of step_ended" in breach for breach in violations(log))


@pytest.mark.parametrize(
    "event", ["step_began", "call_ended", "backward_ended", "foreign_step", "optimizer_steps", "step_ended"]
)
def test_an_event_that_nobody_is_told_of_is_noticed(
    event: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Observers.tell

    def told(these: Observers, what: Any, *args: Any) -> None:
        if what.__name__ != event:
            tell(these, what, *args)

    monkeypatch.setattr(Observers, "tell", told)
    (log,) = train(loops.beside_another, run_folder).logs
    assert violations(log)


@pytest.mark.parametrize("owned", [True, False])
def test_an_optimizer_that_is_taken_for_another_models_is_noticed(
    owned: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of another model that is taken for the run's own."""
    monkeypatch.setattr(OptimizerNumbers, "owns", lambda *_: owned)
    (log,) = train(loops.beside_another, run_folder).logs
    told = {
        True: "another model's optimizer steps, and nobody was told",
        False: "foreign_step is told of an own optimizer",
    }
    assert told[owned] in violations(log)


def test_a_schedule_that_is_told_before_it_is_known_whether_the_step_was_skipped_is_noticed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scheduled(watch: StepWatch, scheduler: Any) -> None:
        watch._observers.tell(StepObserver.scheduler_stepped, scheduler)

    monkeypatch.setattr(StepWatch, "scheduled", scheduled)
    (log,) = train(loops.handed_and_scheduled, run_folder).logs
    assert set(violations(log)) == {"scheduler_stepped inside attempt_began"}


def test_a_schedule_of_another_models_optimizer_is_noticed(right: list[Log]) -> None:
    (other,) = (heard.about for heard in right[-1].events() if heard.what == "foreign_step")
    of_other = [
        heard._replace(about=SimpleNamespace(optimizer=other)) if heard.what == "scheduler_stepped" else heard
        for heard in right[-1]
    ]
    assert violations(_made(right[-1], of_other)) == ["scheduler_stepped is told of another model's optimizer"]


def test_a_region_that_is_told_to_be_off_and_is_not_is_noticed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Observers.tell

    def told(these: Observers, what: Any, *args: Any) -> None:
        if what.__name__ == "scaler_joined":
            tell(these, StepObserver.region_switched_off, "cpu")
        tell(these, what, *args)

    monkeypatch.setattr(Observers, "tell", told)
    (log,) = train(loops.one_good_step, run_folder).logs
    assert violations(log) == ["a step begins in a region for cpu, which is switched off"]


def test_an_event_after_the_end_of_a_run_is_noticed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Observers.tell

    def told(these: Observers, what: Any, *args: Any) -> None:
        tell(these, what, *args)
        if what.__name__ == "run_ended":
            tell(these, StepObserver.region_switched_off, "cpu")

    monkeypatch.setattr(Observers, "tell", told)
    (log,) = train(loops.one_good_step, run_folder).logs
    assert set(violations(log)) == {"region_switched_off after the run has ended"}


def test_an_optimizer_that_steps_unseen_is_noticed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the protocol is broken where a run hears of no step at all: torch's own hook counts it."""
    monkeypatch.setattr("ampscope.capture.step.step_watch.StepWatch.before_optimizer", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        assert_protocol(train(loops.one_closure, run_folder))
