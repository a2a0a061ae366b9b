"""The step in progress and an optimizer's attempt to end it: what is known of them so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.calls.call_state import Ambient
from ampscope.capture.torch_support.local_shards import has_arrived, local
from ampscope.capture.torch_support.readback import Parcel


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
    sent: dict[int, Sent] = field(default_factory=dict)  #: norms on their way to the host, by ``id``
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
            self.sent[id(norm)] = Sent(norm, Parcel({"norm": norm}))

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


class Sent(NamedTuple):
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
