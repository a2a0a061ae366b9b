"""AMPscope's own faults: whatever part fails, training goes on to the same bits and says so once.

A part is made to fail after the watch has begun, at every call or once. `PARTS` takes one function out of each room
of capture; names of functions that are gone are an error, so that the list stays true.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import ampscope
import ampscope.capture
from ampscope.trace.schema import EventKind, Table
from tests.support.training.guarded_training import STEPS, training
from tests.support.training.torch_state import AT_REST, installed
from tests.support.training.twin_runs import differences, exact_state, seed_everything

#: What fails, and the part that must name itself; empty where any part may, as several call it.
PARTS: dict[str, str] = {
    "tensor_tree.tensors": "the step tape",
    "call_tape.Tape.module_call": "the step tape",
    "call_tape.Tape.function_call": "the step tape",
    "call_tape.Tape.backward_call": "the step tape",
    "call_tape.Tape._arguments": "the step tape",
    "function_names.is_in_place": "the step tape",
    "call_state.ambient_now": "the step tape|the following of what the loop carries",
    "user_line.user_place": "",
    "state_snapshot.StateSnapshot.take": "the step tape",
    "tape_mode.TapeMode._note": "the step tape",
    "tracer.Tracer._note": "the op tracer",
    "tracer.Tracer.insert": "",
    "tracer.Tracer.rows": "",
    "light_statistics.Slots.measure": "the op tracer",
    "full_statistics.Census.measure": "",
    "full_statistics.Census.read": "",
    "sites.Sites.number": "",
    "torch_private.insert_dispatch_mode": "",
    "torch_private.storage_key": "",
    "fidelity.compared": "the replay",
    "incidents.Incidents._replay": "the replay",
    "cure_search.CureSearch.examine": "the trial of cures",
    "failure.located": "the trial of cures",
    "memory.fits": "the trial of cures",
    "engine.RerunEngine.run": "the replay|the trial of cures",
    "run_recorder.Recorder.trial": "the trial of cures",
    "run_recorder.Recorder.trace": "",
    "gradients.non_finite": "the step record",
    "gradients.total_norm": "the step record|the look at what trains",
    "step_rows.StepRows.write": "the step record",
    "readback.Readback.fetch": "",
    "readback.Readback.poll": "",
    "run_recorder.Recorder.step": "",
    "run_recorder.Recorder.incident": "",
    "run_recorder.Recorder.grads": "the step record",
    "run_recorder.Recorder.scaler_event": "the scaler's history",
    "run_recorder.Recorder.event": "",
    "scaler_history.ScalerHistory._event": "the scaler's history",
    "torch_private.scaler_tensors": "the scaler's history|the usage check",
    "usage_watch.UsageWatch.before_backward": "the usage check",
    "usage_watch.UsageWatch.after_backward": "the usage check",
    "usage_watch.UsageWatch.saw_function": "",
    "usage_watch.UsageWatch.before_unscale": "",
    "usage_watch.UsageWatch.stepped": "the usage check",
    "configuration.Configuration._look": "the settings",
    "sampled_step.SampledSteps.gradients": "the op tracer",
    "sampled_step.SampledSteps._look": "the op tracer",
    "sampled_shapes.Shapes.offer": "the op tracer",
    "budgets.TraceBudget.wants": "",
    "budgets.TraceBudget.took": "",
    "models.Models.owns": "",
}


class Injected(RuntimeError):
    """A fault of a part's own."""


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(ampscope.capture.__path__, "ampscope.capture.")
    return [importlib.import_module(each.name) for each in found]


class Fault:
    """Makes one function of capture raise: at every call, or at its ``at``-th only."""

    def __init__(self, part: str, at: int | None) -> None:
        self.calls = 0
        self._at = at
        self._patch = pytest.MonkeyPatch()
        room, *owner, self._name = part.split(".")
        (module,) = (each for each in _modules() if each.__name__.endswith(f".{room}"))
        self._owner = getattr(module, owner[0]) if owner else module
        self._original = inspect.getattr_static(self._owner, self._name)

    def inject(self) -> None:
        function = getattr(self._owner, self._name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self._at is None or self.calls == self._at:
                raise Injected("on purpose")
            return function(*args, **kwargs)

        if inspect.ismodule(self._owner):
            for module in _modules():
                for name, value in list(vars(module).items()):
                    if value is self._original:
                        self._patch.setattr(module, name, failing)
        else:
            self._patch.setattr(self._owner, self._name, failing)

    def undo(self) -> None:
        self._patch.undo()


def parts_and_calls() -> list[Any]:
    """Each part fails always, every third one once, too: the rest of those is of `make soak`, as in all of capture."""
    return [
        pytest.param(
            part, at, id=f"{part}-{'always' if at is None else 'once'}", marks=pytest.mark.soak if rare else ()
        )
        for number, part in enumerate(PARTS)
        for at in (None, 2)
        for rare in (at is not None and bool(number % 3),)
    ]


@pytest.mark.usefixtures("modes_removed")
@pytest.mark.parametrize(("part", "at"), parts_and_calls())
def test_training_goes_on_unchanged(
    part: str, at: int | None, unwatched_state: dict[str, bytes], run_folder: Path
) -> None:
    fault, scopes = Fault(part, at), []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, quiet=True))
        fault.inject()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seed_everything()
        try:
            state = exact_state(training(watch))
            scopes[0].close()
        finally:
            fault.undo()
            scopes[0].close()
    assert differences(state, unwatched_state) == []
    assert installed() == AT_REST
    if at is not None and fault.calls < at:
        pytest.skip("called once only")
    assert fault.calls
    told = [str(one.message) for one in caught if "ampscope" in str(one.message)]
    assert told
    assert len(told) == len(set(told)), "each part tells once"
    assert all("Injected: on purpose" in text and "training goes on unchanged" in text for text in told)
    assert any(own in text for text in told for own in PARTS[part].split("|")), told
    run = ampscope.open_run(run_folder)
    assert run.status == "closed"
    if part != "run_recorder.Recorder.event":
        assert len(run.rows(Table.EVENTS, kind=EventKind.WARNING)) == len(told)
    if at is not None:
        assert len(run.rows(Table.STEPS)) >= STEPS - 1, "one fault costs one row at most"
    ampscope.diagnose(run)


def test_a_dead_writer_does_not_stop_training(unwatched_state: dict[str, bytes], run_folder: Path) -> None:
    """The disk is full, the writer's thread is gone: every row raises from now on, the last one in close()."""
    from ampscope.trace.write.writer import TraceWriter

    patch, scopes = pytest.MonkeyPatch(), []

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, quiet=True))
        patch.setattr(TraceWriter, "put", refuse)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seed_everything()
        try:
            state = exact_state(training(watch))
            scopes[0].close()
        finally:
            patch.undo()
            scopes[0].close()
    assert differences(state, unwatched_state) == []
    assert installed() == AT_REST
    told = [str(one.message) for one in caught if "ampscope" in str(one.message)]
    assert told
    assert all("No space left" in text for text in told)


def test_warnings_as_errors_do_not_stop_training(unwatched_state: dict[str, bytes], run_folder: Path) -> None:
    """``python -W error``: the user's choice for their own code, not a way for a guest's fault to end the run."""
    fault, scopes = Fault("call_tape.Tape._arguments", None), []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, quiet=True))
        fault.inject()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seed_everything()
        try:
            state = exact_state(training(watch))
        finally:
            fault.undo()
            for scope in scopes:
                scope.close()
    assert differences(state, unwatched_state) == []
