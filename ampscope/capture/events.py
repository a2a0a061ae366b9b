"""The events of an optimizer step are plain data; a `StepObserver` is told of them, and of how the run ends."""

from __future__ import annotations

import builtins
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support import tensor_tree, torch_private, transforms
from ampscope.capture.torch_support.call_state import Ambient
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.sharding import has_arrived, local
from ampscope.capture.torch_support.user_line import Place


@dataclass(slots=True)
class OpenStep:
    """Holds what has been gathered in the step in progress, from its first forward on."""

    began: float  #: `time.perf_counter` when it began
    losses: list[Tensor] = field(default_factory=list)  #: that backward was called on, unscaled
    waiting: list[Tensor] = field(default_factory=list)  #: scaled, but no backward has come for them yet
    parcels: list[Parcel] = field(default_factory=list)  #: the losses, on their way to the host
    norms: dict[int, Tensor | None] = field(default_factory=dict)  #: of unscaled gradients, by ``id`` of the optimizer
    given_norms: dict[int | None, Tensor] = field(default_factory=dict)  #: without a scaler: as the latest backward has
    #: left the gradients, by ``id`` of the optimizer; None for all gradients, where no optimizer is known yet
    edited: dict[int, Tensor | None] = field(default_factory=dict)  #: likewise, where the loop has changed them since
    sent: dict[int, DeviceNumber] = field(default_factory=dict)  #: norms on their way to the host, by ``id``
    micro_batches: int = 0
    scaler: Any = None  #: that scaled its latest loss
    updated: bool = False  #: the scaler has heard what unscaling found: the loop itself has passed the optimizer by
    norm: Tensor | None = None  #: of gradients that were judged as they were given, for nothing keeps those
    found_inf: dict[int, Parcel] = field(default_factory=dict)  #: by ``id`` of optimizers whose steps no hook tells of
    doubt: Doubt | None = None  #: gradients that were not finite when they were given
    bad: StepAttempt | None = None  #: went bad, as far as it had come, before its weights were moved
    by_hand: bool = False  #: no optimizer but the loop itself has ended it

    def scaled(self, losses: Any) -> None:
        """A scaler was given ``losses``."""
        self.waiting += _values(tensor_tree.tensors(losses))

    def backward(self, roots: Iterable[Tensor]) -> None:
        """A backward runs: of the losses that were scaled, or of its roots where none were."""
        losses = self.waiting or _values(roots)
        self.waiting = []
        self.losses += losses
        for loss in losses:
            if loss.numel() == 1:
                self.parcels.append(Parcel({"loss": loss}))

    def given(self, losses: list[Tensor]) -> None:
        """Gradients were asked of ``losses``, and no backward has run."""
        self.micro_batches += len(losses)
        self.backward(losses)

    def unscaled(self, optimizer: Optimizer, norm: Tensor | None) -> None:
        """The gradients of ``optimizer``, with this norm, are free of the scale."""
        self.norms[id(optimizer)], self.updated = norm, False
        self.send(norm)

    def changed(self, optimizer: Optimizer, norm: Tensor | None) -> None:
        """The loop has changed the unscaled gradients of ``optimizer``, which have this norm now."""
        self.edited[id(optimizer)] = norm
        self.send(norm)

    def send(self, norm: Tensor | None) -> None:
        """Starts a copy of ``norm`` to the host: who asks for it after the device was waited for has it at once."""
        if norm is not None and not norm.is_cpu:
            self.sent[id(norm)] = DeviceNumber(norm, Parcel({"norm": norm}))

    def number(self, norm: Tensor) -> float:
        """The value of a norm; waits for what has not arrived."""
        sent = self.sent.get(id(norm)) if self.sent else None
        value = sent.parcel.values()["norm"] if sent is not None else None
        return float(norm) if value is None else value

    def known_number(self, norm: Tensor | None) -> float | None:
        """The value of a norm as far as the host has it without waiting."""
        if norm is None or norm.is_cpu:
            return None if norm is None else float(norm)
        sent = self.sent.get(id(norm))
        return sent.parcel.values()["norm"] if sent is not None and sent.parcel.arrived else None

    def wait_for_losses(self) -> None:
        """Waits until the host knows every loss."""
        for parcel in self.parcels:
            parcel.values()

    @property
    def loss_known_bad(self) -> bool:
        """Whether a loss is non-finite, as far as the host knows without waiting for the device."""
        for parcel in self.parcels:
            if parcel.is_here or parcel.arrived:
                loss = parcel.values()["loss"]
                if loss is not None and loss - loss != 0:
                    return True
        return False

    def known_loss(self) -> float | None:
        """Mean of the losses; None without any, or where the host does not know them all without waiting."""
        total = 0.0
        for parcel in self.parcels:
            if not (parcel.is_here or parcel.arrived):
                return None
            total += parcel.values()["loss"] or 0.0
        return total / len(self.parcels) if self.parcels else None

    def mean_loss(self) -> Tensor | None:
        """Mean of the losses as one device scalar; None without any."""
        if len(self.losses) == 1 and self.losses[0].dim() == 0:
            return self.losses[0]
        means = [loss.float().mean() for loss in self.losses if loss.numel()]
        return torch.stack([mean.to(means[0].device) for mean in means]).mean() if means else None


class DeviceNumber(NamedTuple):
    """A number on the device, kept so that its ``id`` stays its own, and its copy."""

    tensor: Tensor
    parcel: Parcel


def _values(losses: Iterable[Tensor]) -> list[Tensor]:
    """The losses as far as they lie on this rank, without those that a collective of the loop's still writes."""
    return [local(loss).detach() for loss in losses if has_arrived(loss)]


class ScaleState(NamedTuple):
    """A scaler's scale and growth tracker at one moment, copied: ``update`` writes into the originals."""

    scaler: Any
    scale: Tensor | None
    tracker: Tensor | None

    @staticmethod
    def of(scaler: Any) -> ScaleState:
        """The state now."""
        scale, tracker = held = torch_private.scaler_tensors(scaler)
        past_dispatch, past_functions = torch_private.past_modes(held)
        with past_dispatch, past_functions:
            scale = scale.detach().clone() if scale is not None else None
            tracker = tracker.detach().clone() if tracker is not None else None
        return ScaleState(scaler, scale, tracker)


@dataclass(slots=True)
class StepAttempt:
    """One optimizer's attempt at a step: what is known of it while it runs.

    It has many attributes because every part that judges it leaves there what the next one needs.
    """

    optimizer: Optimizer
    index: int  #: number of the optimizer
    step: int
    scaling: ScaleState | None  #: None without a scaler
    opened: OpenStep
    norm: Tensor | None = None  #: of the unscaled gradients
    unclipped: Tensor | None = None  #: that norm before the loop changed them, where that was asked for
    stepped: bool = False  #: the optimizer itself ran
    bad: bool = False  #: an incident was reported
    found_inf: list[Tensor] = field(default_factory=list)  #: of an optimizer that decides on the device
    norms: dict[str, Tensor] = field(default_factory=dict)  #: per parameter, likewise
    traced: str = ""  #: which execution of the step the trace holds
    late: bool = False  #: the weights had moved before it was known that they would
    judging_s: float = 0.0  #: what replays of it took
    over: bool = False  #: the loop has gone on
    left_out: bool = False  #: healing has left the step out: its optimizer was skipped, or had nothing to do
    handed: Any = None  #: what a scaler was told to step: the optimizer, or what has it step
    before: Any = None  #: a copy of the optimizer with all that it writes, as it was before it stepped
    on_device: bool = False  #: the optimizer unscales and skips on the device

    def __post_init__(self) -> None:
        asked = self.optimizer if self.handed is None else self.handed
        self.on_device = self.scaling is not None and torch_private.steps_on_device(asked)

    @property
    def scale(self) -> float | None:
        """The loss scale, read from the device; None without a scaler."""
        return float(self.scaling.scale) if self.scaling is not None and self.scaling.scale is not None else None

    @property
    def norm_before_clipping(self) -> Tensor | None:
        """The norm of the unscaled gradients as backward has left them, if some are left and as far as it is known."""
        return self.norm if self.unclipped is None or self.norm is None else self.unclipped

    @property
    def by_hand(self) -> bool:
        """Whether no optimizer but the loop itself moves the weights, and is about to."""
        nobody = self.handed is None and not isinstance(self.optimizer, Optimizer)
        return nobody and self.stepped and not self.late


class Doubt(NamedTuple):
    """Gradients that are not finite, as long as the loop may still leave them out."""

    attempt: StepAttempt  #: holds them
    given_by: list[int]  #: the entries of the tape that gave such
    recording: Any  #: what it takes to run the step again, as far as it had come; None where that is not known


class EndedStep(NamedTuple):
    """An attempt is over."""

    attempt: StepAttempt
    number: int  #: as `StepStart.number`
    seconds: float  #: since the step began
    ambient: Ambient  #: the loop's autocast and grad mode


class StepStart(NamedTuple):
    """A step begins with the first forward of a watched model."""

    number: int  #: of the step attempts of this process
    optimizers: int  #: whose steps take turns (a GAN's), as far as is known
    apart: bool  #: the attempt before is still undecided, and what it holds is not to be touched
    ambient: Ambient  #: the loop's autocast and grad mode


@dataclass(slots=True)
class InsideTransform:
    """Holds what was seen of the functions that a transform calls."""

    factors: deque[Any] = field(default_factory=lambda: deque(maxlen=8))  #: of its single values: of losses
    half: bool = False  #: some ran where autocast computes in float16


@dataclass(slots=True)
class Through:
    """A call that runs a watched module in the loop's place: a transform, or ``functional_call``."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: slice  #: of ``args``: what the model's own arguments are among
    weights: dict[str, Tensor] | None = None  #: that take the place of the module's own; None for a transform
    module: nn.Module | None = None  #: the watched module that was called, as soon as that is known
    trains: bool = False  #: autograd follows that call
    promising: bool = True  #: such calls have led to the model in training, or are new
    reads: Callable[[Tensor], Tensor] | None = None  #: is shown what a transform reads from outside, and returns it
    inside: InsideTransform = field(default_factory=InsideTransform)

    @property
    def is_transform(self) -> bool:
        """Whether the call is seen from outside only."""
        return self.weights is None

    @property
    def user_function(self) -> Callable[..., Any]:
        """The function that a transform was given."""
        return transforms.innermost(self.args[0])

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that the loop gave: a model's arguments, and its weights."""
        return (self.weights, self.args[self.inputs]) if self.weights is not None else self.args[self.inputs]

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments that the loop gave by position, the model's own among them."""
        return transforms.given(self.args, self.inputs)


def may_train(through: Through | None) -> bool:
    """Whether a call that is about to run can begin a step; transforms may follow gradients where the loop does not.

    Args:
        through: What calls a watched module in the loop's place, if anything does.
    """
    return through.promising if through is not None and through.is_transform else torch.is_grad_enabled()


class ModuleCall(NamedTuple):
    """An outermost call of a watched module."""

    module: nn.Module
    args: Any
    kwargs: Any
    ambient: Ambient  #: the loop's autocast and grad mode
    learning: bool  #: one of the first steps, in which is learned what forward does besides computing
    through: Through | None = None  #: what calls it in the loop's place

    @property
    def is_foreign(self) -> bool:
        """Whether it is a transform that turned out to train nothing of the model's."""
        return self.through is not None and self.through.is_transform and not self.through.trains


class BackwardCall(NamedTuple):
    """A backward pass of the step."""

    args: Any
    kwargs: Any
    roots: list[Tensor]  #: what it starts from
    ambient: Ambient  #: the loop's autocast and grad mode
    several_optimizers: bool  #: there may be optimizers that it is not for


class BareStep(NamedTuple):
    """``optimizer.step()`` was called without a scaler, or past it."""

    optimizer: Optimizer
    half_forward: bool = False  #: a forward of the step ran in float16
    late: bool = False  #: another optimizer has ended the step already


class WeightsCast(NamedTuple):
    """The loop has given parameters of a watched model that are trained another dtype, as ``model.half()`` does."""

    place: Place | None  #: the loop's line
    changed: int  #: parameters whose dtype has changed
    of: int  #: parameters that the call went through
    dtype: torch.dtype  #: of the first of them, now
    step: int = 0  #: the step attempt before which it happened


class ScalerMethod(StrEnum):
    """The methods of a ``GradScaler`` whose calls are noted; the value is the method's name."""

    SCALE = "scale"
    UNSCALE = "unscale_"
    STEP = "step"
    UPDATE = "update"
    GET_SCALE = "get_scale"
    STATE_DICT = "state_dict"
    LOAD_STATE_DICT = "load_state_dict"
    SET_GROWTH_FACTOR = "set_growth_factor"
    SET_BACKOFF_FACTOR = "set_backoff_factor"
    SET_GROWTH_INTERVAL = "set_growth_interval"


class JoinedScaler(NamedTuple):
    """A scaler that has become the run's."""

    scaler: Any
    number: int  #: within the run
    place: Place | None  #: the user's line


class ScalerCall:
    """A call of one of a scaler's methods; what is not known yet is filled in on its way.

    Attributes:
        argument: The first: losses, an optimizer, a state, a setting; None where the call has none.
        scaler: Whose method it is.
        number: Of the scaler within the run.
        by_loop: Not by ``step`` itself.
        place: The user's line.
        result: Known when the call has ended.
        state: The scaler's, before a step or an update.
        attempt: The attempt that ``step`` made.
        ambient: The loop's autocast and grad mode, where a ``scale`` is not heard by the tape's mode.
    """

    def __init__(self, method: ScalerMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.method, self.args, self.kwargs = method, args, kwargs
        self.argument: Any = args[0] if args else next(iter(kwargs.values()), None)
        self.scaler: Any = None
        self.number = 0
        self.by_loop = True
        self.place: Place | None = None
        self.result: Any = None
        self.state: ScaleState | None = None
        self.attempt: StepAttempt | None = None
        self.ambient: Ambient | None = None

    @property
    def scaling(self) -> ScaleState:
        """The scaler's state as it is known."""
        return self.state or ScaleState(self.scaler, None, None)


#: How the names of exceptions end that say something failed; by others (``StopTraining``) a program stops itself.
_FAILURES = ("Error", "Exception", "Warning")


class RunEnd(NamedTuple):
    """The end of a run."""

    error: BaseException | None = None  #: that ended it
    is_known: bool = False  #: whether ``error`` is all there is to know; else an error may have ended it unseen

    @property
    def failure(self) -> BaseException | None:
        """The error, where it is one: neither Ctrl+C, nor what a program stops itself by."""
        return self.error if self.error is not None and _is_failure(self.error) else None

    def reasons(self) -> Iterator[BaseException]:
        """The error, and those that it was raised from or while handling."""
        error, seen = self.error, set[int]()
        while error is not None and id(error) not in seen:
            yield error
            seen.add(id(error))
            error = error.__cause__ or error.__context__


#: Nothing is known of the end, or it has not come.
END_NOT_KNOWN = RunEnd()


def end_in_flight(before: int) -> RunEnd:
    """The end of a run that is closed now, by whatever is being handled at the moment.

    Args:
        before: What `error_handled` was when the run began: a program that tries again is no error of the second run.
    """
    error = sys.exc_info()[1]
    known = error is not None and id(error) != before
    return RunEnd(error, is_known=True) if known else END_NOT_KNOWN


def end_of_process(before: int) -> RunEnd:
    """The end of a run that is still open when the process ends; ``before`` as for `end_in_flight`."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    is_interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")  # there, errors end a cell at most
    known = error is not None and id(error) != before and not is_interactive
    return RunEnd(error, is_known=True) if known else END_NOT_KNOWN


def error_handled() -> int:
    """``id`` of the exception that is being handled now; 0 without one."""
    error = sys.exc_info()[1]
    return id(error) if error is not None else 0


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception) and type(error).__name__.endswith(_FAILURES)


class FunctionListener(Protocol):
    """Is told of the torch functions that the loop calls outside watched modules."""

    def saw_function(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, after_backward: bool
    ) -> None:
        """A function has run."""

    def scaled(self, loss: Any, scale: Any, result: Any) -> None:
        """A scaler has multiplied a loss by its scale."""

    def is_unheard(self, *, known: bool = True) -> None:
        """The calls that the loop makes now, after a backward, are not told: they are those of before, if ``known``."""

    @property
    def scales_by_hand(self) -> bool:
        """Whether the loop multiplies its losses by a scale of its own, so that gradients hold one."""

    def edited(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A function has run between the unscaling of gradients and the scaler's update."""

    def weights_move(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function is about to move weights."""

    def transformed(self, factors: Iterable[Any], result: Any) -> None:
        """A transform has returned, and has multiplied single values with ``factors``."""


class CallWatcher(Protocol):
    """Looks at the torch functions that the loop calls outside watched modules, before they run."""

    def __call__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function is about to run."""


class OtherCalls(Protocol):
    """Makes functions that the loop calls outside watched modules otherwise than they are written."""

    @property
    def of_step(self) -> tuple[Any, ...]:
        """Tells what is otherwise in the step in progress; empty for nothing."""

    @property
    def to_repeat(self) -> tuple[Any, ...]:
        """Tells which part of it a replay of the step makes again."""

    def step_began(self) -> None:
        """Another step has begun."""

    def release(self) -> None:
        """No more functions come in this step."""

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function; where it fails, it is the loop's own that has failed."""


#: Is told of a torch function that raised, with its arguments; must not raise itself.
ErrorListener = Callable[[Exception, Callable[..., Any], Any, Any], object]


class StepObserver:
    """Is told what happens in a step; each event does nothing unless an observer has use for it.

    `ampscope.capture.step.observers` says who is told of what, in which order, and runs each under its own guard.
    """

    guard: Guard  #: catches the observer's faults, and is broken once it has caught one

    def step_began(self, start: StepStart) -> None:
        """The first watched forward of a step is about to run."""

    def call_began(self, call: ModuleCall) -> None:
        """A watched module is about to be called."""

    def call_ended(self, call: ModuleCall, result: Any) -> None:
        """The call has returned."""

    def call_lost(self, call: ModuleCall) -> None:
        """The call was left by an exception: it is no part of the step."""

    def backward_began(self, backward: BackwardCall) -> None:
        """A backward is about to run."""

    def backward_ended(self) -> None:
        """A backward has run."""

    def gradients_complete(self) -> None:
        """Nothing that follows in this step is ever replayed: unscaling, clipping, the optimizer."""

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """The run has got a scaler."""

    def scaler_call_began(self, call: ScalerCall) -> None:
        """A method of a scaler is about to run."""

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """A scaler's method has run."""

    def scaler_call_lost(self, call: ScalerCall) -> None:
        """A scaler's method was left by an exception, an optimizer's own perhaps."""

    def attempt_began(self, attempt: StepAttempt) -> None:
        """An optimizer is about to be stepped, or skipped."""

    def bare_step(self, bare: BareStep) -> None:
        """An optimizer steps without a scaler, or past it."""

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """An optimizer is about to change its parameters."""

    def weights_cast(self, cast: WeightsCast) -> None:
        """The loop has given the parameters of a watched model another dtype."""

    def foreign_step(self, optimizer: Optimizer) -> None:
        """An optimizer that holds no watched parameter steps while a step of the watched model is open."""

    def region_switched_off(self, device: str) -> None:
        """The loop has made an autocast region for a kind of device, which torch has switched off."""

    def step_ended(self, ended: EndedStep) -> None:
        """An attempt is over."""

    def scheduler_stepped(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""

    def abandoned(self, reason: str) -> None:
        """The step in progress is given up; an incident in it cannot be replayed."""

    def run_ended(self, end: RunEnd) -> None:
        """No further step will come: the scope is being closed."""
