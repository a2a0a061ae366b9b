"""`Healing` says what a run may change of its own training; the healing log tells what it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.errors import WatchError
from ampscope.trace.schema import CureKind, EventKind

#: What is said as a run begins.
BEGINS = "healing is on: where a replay proves a cure, this training is changed, and each change is told"
#: What is said where nothing can be changed alike on all ranks.
OF_RANKS = "healing is off: its ranks cannot agree before init_process_group; call ampscope.watch after that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """The settings of what ``ampscope.watch(model, scaler, heal=...)`` may change; ``heal=True`` is ``Healing()``.

    Nothing is changed until a step goes bad, and then only what a replay of that very step has proved.

    Attributes:
        max_cures: Changes in force at a time, of those that last; what a run needs beyond them is not done.
        max_slowdown: Share of the time of a step that a change may cost, as replays of a good step with it and without
            it measure it; what costs less than a millisecond is not told from noise.
        kinds: Which kinds there may be: ``"modules_fp32"``, ``"conversions"``, ``"form"``, ``"loss_scale"``,
            ``"state"``, ``"run_again"``, ``"weights"``, ``"rows_left_out"``, ``"left_out"``. Default: all.
        quiet_steps: Good steps after which a change is tried without, on a replay; three such looks that are finite
            lift it. 0: never.
    """

    max_cures: int = 8
    max_slowdown: float = 0.05
    kinds: Sequence[str] = tuple(CureKind)
    quiet_steps: int = 64

    def __post_init__(self) -> None:
        known = [str(kind) for kind in CureKind]
        kinds = (self.kinds,) if isinstance(self.kinds, str) else self.kinds
        if unknown := [kind for kind in kinds if kind not in known]:
            raise WatchError(f"there is no kind of cure {str(unknown[0])!r}; there are {', '.join(known)}")
        _check_count("max_cures", self.max_cures)
        _check_count("quiet_steps", self.quiet_steps)
        slowdown: object = self.max_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not slowdown >= 0:
            raise WatchError(f"max_slowdown={slowdown!r}: give a share of a step's time, e.g. 0.05")
        object.__setattr__(self, "kinds", tuple(str(kind) for kind in kinds))

    def allows(self, kind: CureKind) -> bool:
        """Whether there may be changes of a kind."""
        return kind in self.kinds


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WatchError(f"{name}={value!r}: give a whole number, 0 or more")


def asked_for(heal: object) -> Healing | None:
    """The settings that ``heal=`` asks for; None where there is to be none.

    Raises:
        WatchError: It is neither a bool nor a `Healing`.
    """
    if heal is None or isinstance(heal, bool):
        return Healing() if heal else None
    if not isinstance(heal, Healing):
        raise WatchError(f"heal={heal!r}: give True, or ampscope.Healing(...)")
    return heal


def configured(healing: Healing | None) -> dict[str, bool]:
    """Returns what the run's manifest says of healing; nothing where there is none."""
    return {"heal": True} if healing is not None else {}


#: How many changes are told in the terminal; all are in the trace.
MAX_TOLD = 12


class TrainingChange(NamedTuple):
    """A change of the training."""

    step: int  #: the bad step
    optimizer: int
    kind: CureKind
    text: str  #: what was changed, as a clause
    modules: Sequence[str] = ()
    code: str = ""  #: makes it permanent
    detail: dict[str, Any] = {}  # noqa: RUF012  # read only  #: what it takes to make it again
    applied: bool = False  #: the gradients of the step itself were replaced, and the optimizer stepped


class HealingLog:
    """Writes changes down and tells of them."""

    def __init__(self, recorder: Recorder, terminal: Terminal) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._told = 0
        self._declined: set[str] = set()

    def line(self, key: str, text: str) -> None:
        """A line, on one rank."""
        self._terminal.once(f"heal-{key}", text)

    def made(self, change: TrainingChange, *, why_not_applied: str = "", at_once: bool = False) -> None:
        """A change was made.

        Args:
            change: The change.
            why_not_applied: Why the step itself could not be saved, in words.
            at_once: One that lasts holds for the step itself.
        """
        detail: dict[str, Any] = {
            "kind": change.kind,
            "modules": list(change.modules),
            "text": change.text,
            "code": change.code,
            "optimizer": change.optimizer,
            "applied": change.applied,
            "lost": _lost(change, why_not_applied),
            "at_once": at_once,
            **change.detail,
        }
        self._recorder.event(EventKind.CURE, change.step, json.dumps(detail))
        lasts = f" from {'this' if at_once else 'the next'} step on" if change.code else ""
        step = _of_step(change, why_not_applied)
        self._told += 1
        if self._told <= MAX_TOLD:
            last = " Further changes are recorded but not printed." if self._told == MAX_TOLD else ""
            self.line(f"{change.step}-{change.kind}", f"step {change.step}: healed: {change.text}{lasts}{step}.{last}")

    def again(self, change: TrainingChange) -> None:
        """A change was made again, as the run was resumed."""
        self.line(f"again-{change.step}-{change.kind}", f"as since step {change.step}: {change.text}.")

    def recompiled(self, step: int, graphs: int) -> None:
        """A change had compiled code compiled again, in the step that is over."""
        if graphs > 0:
            text = f"the change had {'one graph' if graphs == 1 else f'{graphs} graphs'} compiled again"
            self._recorder.event(EventKind.NOTE, step, text)
            self.line(f"recompiled-{step}", f"step {step}: {text}.")

    def lifted(self, change: TrainingChange, at: int, why: str) -> None:
        """A change that lasted was taken back."""
        detail = {"kind": change.kind, "modules": list(change.modules), "cure": change.step, "text": why}
        self._recorder.event(EventKind.CURE_LIFTED, at, json.dumps(detail))
        self.line(f"lifted-{at}-{change.step}", f"step {at}: lifted: {change.text}; {why}.")

    def declined(self, step: int, why: str) -> None:
        """A step could not be healed; each reason is told once."""
        if why not in self._declined:
            self._declined.add(why)
            self._recorder.event(EventKind.NOTE, step, f"not healed: {why}")
            self.line(f"declined-{step}-{len(self._declined)}", f"step {step}: not healed: {why}.")

    def stands_still(self, step: int, steps: int) -> None:
        """Tells once that so many steps in a row were left out."""
        text = f"{steps} steps in a row were left out: weights and loss scale are kept, but the training stands still"
        self._recorder.event(EventKind.NOTE, step, text)
        self.line("stands-still", f"step {step}: {text}.")

    def ended(self, step: int, why: str) -> None:
        """Healing is over."""
        self._recorder.event(EventKind.NOTE, step, f"healing ended: {why}")
        self.line("ended", f"step {step}: healing ended, and training goes on as it would have: {why}.")

    def closes(self, changes: Sequence[TrainingChange]) -> None:
        """The run is over: tells what makes the changes permanent that are in force."""
        codes = list(dict.fromkeys(change.code for change in changes if change.code))
        if codes:
            self.line("closes", "to keep what healed this run, write: " + "; ".join(codes))


def _of_step(change: TrainingChange, why_not: str) -> str:
    """Says in words what became of the step itself."""
    if change.applied:
        return "; the step was made with the gradients of its replay"
    lost = _lost(change, why_not)
    return f"; the step itself is lost ({lost})" if lost else ""


def _lost(change: TrainingChange, why_not: str) -> str:
    return "" if change.applied or change.kind is CureKind.LEFT_OUT else why_not
