"""A watched training run: installs every part, removes it again, and owns the trace."""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ampscope.capture import events
from ampscope.capture.assembly import step_watch
from ampscope.capture.budgets import TraceBudget, replays
from ampscope.capture.heal.healing import Healing
from ampscope.capture.hooks import collective_calls, process_hooks
from ampscope.capture.hooks.module_calls import ModuleWatch
from ampscope.capture.record.configuration import Configurable, Configuration
from ampscope.capture.record.operand_files import OperandFiles
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.signals import LiveFigures, Receivers, Signals
from ampscope.capture.record.terminal import Terminal, UnseenCalls
from ampscope.capture.step.step_watch import ScalerWatch
from ampscope.capture.torch_support import guard, process_group, torch_private
from ampscope.capture.torch_support.guard import Guard, Suppressed, surely
from ampscope.capture.torch_support.models import Extent, Models, extent
from ampscope.capture.torch_support.threads import changing
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind
from ampscope.trace.write.writer import TraceWriter


class Scope(Configurable):
    """The run being recorded, as `ampscope.watch` returns it.

    A context manager; leaving it (or `close`, or the end of the process) removes everything AMPscope installed.
    Many methods because it is what the user holds and what the process-wide hooks call.

    Attributes:
        folder: The run's folder, or its URL.
    """

    _open = False

    def __init__(
        self,
        models: Models,
        writer: TraceWriter,
        receivers: Receivers,
        *,
        settings: Mapping[str, Any],
        sampled: bool,
        replay_budget: int,
        operand_budget: int,
        quiet: bool,
        heal: Healing | None,
    ) -> None:
        self.folder, self._models, self._writer = writer.home, models, writer
        signals = Signals(receivers, writer, self._guard, self._warn) if receivers else None
        self._terminal = Terminal.of(writer, signals, quiet=quiet)
        operands = OperandFiles(writer.folder, writer.rank, operand_budget, self._guard("the keeping of operands"))
        self._recorder = Recorder(writer, models, operands, signals)
        budgets = TraceBudget(None, 0.0, sampled=sampled), replays(settings["overhead"], replay_budget, heals=heal)
        settled: dict[str, Any] = {"guard": self._guard("the settings"), "settings": settings}
        self._configuration = Configuration(models, budgets[0], self._recorder, self._terminal, **settled)
        told = self._guard, budgets, self._terminal, self._configuration, heal
        self._steps = step_watch(models, self._recorder, *told)
        self._configuration.step = partial(self._steps.optimizers.step_of, None)
        self._modules = ModuleWatch(models, self._steps)
        self._modules.keeps, self._home = self, self._modules.home
        self._unseen = UnseenCalls(self._recorder, self._terminal)
        self._scalers: list[ScalerWatch] = []
        self._rank_checked, self._handled_before = False, events.error_handled()
        self._following = self._guard("the watch")
        guard.stand_behind(self)

    # -- opening and closing ------------------------------------------------------------------------------------

    def open(self, scaler: Any | None) -> Scope:
        """Installs everything, or nothing; called by `ampscope.watch`.

        Raises:
            WatchError: The model's class cannot be watched.
        """
        self._open = True
        try:
            self._install(scaler)
        except TypeError as error:
            self.close()
            raise WatchError(f"this model cannot be watched: {error}; watch the modules inside it instead") from error
        self._terminal.begins(self._recorder.segment)
        return self

    def _install(self, scaler: Any | None) -> None:
        self._modules.install()
        process_hooks.join(self, self._home)
        collective_calls.join(self._steps.received, self._home)
        opened[self] = None
        kind = EventKind.RESUME if self._recorder.segment else EventKind.START
        self._recorder.event(kind, self._steps.optimizers.step_of(None), f"torch {torch.__version__}")
        if gone := torch_private.missing():
            self._recorder.event(EventKind.WARNING, 0, f"this torch lacks {', '.join(gone)}")
        if scaler is not None:
            self.adopt(scaler)

    def close(self) -> None:
        """Removes everything from the training process and completes the trace. Safe to call twice."""
        guard.tell(self._close, events.end_in_flight(self._handled_before))

    def _close(self, end: events.RunEnd) -> None:
        with changing:
            was_open, self._open = self._open, False
            opened.pop(self, None)
        if not was_open:
            return
        found: list[Callable[[], None]] = []
        for _ in range(2):
            with Suppressed():
                found = found or self._hooks()
        goes_on, leave = False, self._steps.breaking_off.leave_alone
        with Suppressed():
            goes_on, leave = self._home.goes_on_elsewhere, self._steps.breaking_off.leaving(self._home)
        removals: list[Callable[[], object]] = [
            *found[:2],
            lambda: self._steps.close(end, loop_goes_on=goes_on),
            *found[2:],
            leave,
            lambda: self._unseen.ended(self._steps.optimizers.step_of(None), called=self._modules.was_called),
            self._terminal.close,
            lambda: self._recorder.event(EventKind.CLOSE, self._steps.optimizers.step_of(None), ""),
            self._writer.close,
            self._terminal.end_signals,
            self._models.release,
        ]
        for remove in removals:
            with Suppressed():  # whatever one of them meets, the others follow
                surely(remove, tries=2 if remove in found else 1)

    def _hooks(self) -> list[Callable[[], None]]:
        """Returns the calls that remove every hook by which this scope hears of the loop."""
        left = [lambda: process_hooks.leave(self), lambda: collective_calls.leave(self._steps.received)]
        return [*left, self._modules.uninstall, *(scaler.leave for scaler in self._scalers)]

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            with Suppressed():  # an error may fail to say what it is
                self.note(f"left by {type(error).__name__}: {error}")
        self._close(events.RunEnd(error, is_known=True))

    def __repr__(self) -> str:
        return f"<ampscope.Scope {'open' if self._open else 'closed'} {str(self.folder)!r}>"

    # -- for the user -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Writes an annotation onto the run's time line.

        Args:
            text: What to remember, e.g. ``"switched to the second data set"``.
        """
        guard.tell(lambda: self._recorder.event(EventKind.NOTE, self._steps.optimizers.step_of(None), str(text)))

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk."""
        guard.tell(self._steps.drain)
        guard.tell(self._writer.flush)

    def figures(self) -> LiveFigures:
        """Returns what people watch while a run trains: loss scale, share of skipped steps, cost of observing.

        Never waits for a device: a step counts as soon as its values have reached the host.
        """
        return self._recorder.figures.now

    def watches(self, roots: Iterable[torch.nn.Module]) -> Extent | None:
        """How much of ``roots`` belongs to this scope; None where nothing does."""
        return extent(self._models, list(roots))

    # -- process_hooks.Listener ---------------------------------------------------------------------------------

    def backward_comes(self) -> None:
        """See `process_hooks.Listener`."""
        self._steps.backward_comes()

    def backward_lost(self) -> None:
        """See `process_hooks.Listener`."""
        self._steps.take_up_listening()

    def backward(self, call: Any, args: Any, kwargs: Any) -> Any:
        """See `process_hooks.Listener`."""
        return self._steps.backward(call, args, kwargs)

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, with_closure: bool) -> None:
        """See `process_hooks.Listener`."""
        self._steps.before_optimizer(optimizer, with_closure=with_closure)

    def closure(self, optimizer: torch.optim.Optimizer, call: Any) -> Any:
        """See `process_hooks.Listener`."""
        return call() if self._steps.gives_way_to_capture() else self._steps.closure(optimizer, call)

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See `process_hooks.Listener`."""
        if not self._steps.optimizers.owns(optimizer):
            self._steps.take_up_listening()
        elif not self._steps.gives_way_to_capture():
            self._steps.after_optimizer(optimizer)
            self._check_rank()
            self._modules.stepped()
            self._unseen.stepped(self._steps.optimizers.step_of(None), called=self._modules.was_called)

    def scheduled(self, scheduler: Any) -> None:
        """See `process_hooks.Listener`."""
        self._steps.scheduled(scheduler)

    def region_switched_off(self, device: str) -> None:
        """See `process_hooks.Listener`."""
        self._steps.region_switched_off(device)

    def saved(self, held: object, target: object) -> None:
        """See `process_hooks.Listener`."""
        self._steps.saved(held, target)

    def adopt(self, scaler: Any) -> ScalerWatch | None:
        """Takes a scaler into the run's history: one given to ``watch``, or one that scales this run's loss."""
        for watch in self._scalers:
            if watch.scaler is scaler:
                return None
        if (
            not self._home.is_known
            or self._steps.gives_way_to_capture()
            or not (self._steps.in_progress or not self._scalers)
        ):
            return None
        number, guard = self._recorder.next_scaler + len(self._scalers), self._guard("the scaler's history")
        watch = ScalerWatch(scaler, number, self._steps, guard, self._home)
        self._scalers.append(watch)  # before it joins: what comes in between, a signal, leaves nothing to stay for ever
        try:
            watch.join()
        except BaseException:
            watch.leave()
            self._scalers.remove(watch)
            raise
        return watch

    def succeeded(self, folder: Path) -> None:
        """Ends the run because a newer scope of this process watches the same models, or records into its folder."""
        if folder.absolute() == self.folder.absolute():
            text = (
                "watch was called again for this run's folder: this scope ends, the newer one goes on as a resumed run"
            )
            self._terminal.line(f"{text} ({self._terminal.shown})")
        else:
            text = f"watch was called again for this model: this run ends, the next one is {folder}"
        self.note(text)
        self.close()

    # -- guard.Behind -------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """See `guard.Behind`; the trace so far stays open."""
        if not self._open or self._home.is_elsewhere:
            return
        for leave in [*self._hooks(), self._steps.breaking_off.leave_alone]:
            surely(leave)
        with self._following:
            raise error

    def interrupted(self) -> None:
        """See `guard.Behind`."""
        if self._open and not self._home.is_elsewhere:
            self._steps.breaking_off.interrupted()

    # -- faults and messages ------------------------------------------------------------------------------------

    def _guard(self, part: str) -> Guard:
        scope = weakref.ref(self)

        def failed(text: str) -> None:
            if (owner := scope()) is not None:
                with Suppressed():  # what fails may be the record itself
                    owner._recorder.event(EventKind.WARNING, owner._steps.optimizers.step_of(None), text)
                with Suppressed():
                    owner._steps.part_failed()

        return Guard(part, failed)

    def _check_rank(self) -> None:
        """Says once where a process group that came after `ampscope.watch` knows this rank by another number."""
        if not self._rank_checked:
            self._rank_checked = True
            if changed := process_group.renumbered(self._writer.rank, self._writer.manifest.world_size):
                self._warn(changed)

    def _warn(self, text: str) -> None:
        self._recorder.event(EventKind.WARNING, self._steps.optimizers.step_of(None), text)
        self._terminal.once(f"warning-{hashlib.sha256(text.encode()).hexdigest()[:8]}", text)


opened: dict[Scope, None] = {}  #: the open scopes, in the order in which they were opened
forgotten: list[Scope] = []  #: that nobody holds any more, and that could not be closed when that was found


def open_scopes() -> list[Scope]:
    """Scopes that have not been closed."""
    return list(opened)


@atexit.register
def _close_all() -> None:
    for scope in [*open_scopes(), *forgotten]:
        scope._close(events.end_of_process(scope._handled_before))


class Forgettable(Scope):
    """A scope while it may be collected, which closes it.

    At any other time none has a ``__del__``: it would swallow what a signal handler of the user's raises in it.
    """

    def __del__(self) -> None:
        if not self._open:  # nothing is waited for: a collection comes in any thread, inside anything
            return
        if not changing.acquire(blocking=False):  # who holds it may wait for the thread in which this was collected
            forgotten.append(self)
            return
        try:
            self._close(events.END_NOT_KNOWN)
        finally:
            changing.release()
