"""The calls of a training loop that matter to a step, as the hooks saw them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.open_step import ScaleState, StepAttempt
from ampscope.capture.torch_support.calls import transforms
from ampscope.capture.torch_support.calls.call_state import Ambient
from ampscope.capture.torch_support.user_line import Place


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
