"""One optimizer's attempt at a step: what is known of it while it runs, and the rows it leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step import gradients, lost_updates
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel, Readback, Values
from ampscope.trace.schema import StepRow


@dataclass(slots=True)
class ScaleState:
    """A scaler's tensors when a step was attempted, copied: ``update`` writes into the originals."""

    scaler: Any
    scale: Tensor | None
    tracker: Tensor | None

    @staticmethod
    def of(scaler: Any) -> ScaleState:
        """The state now."""
        scale, tracker = (t.detach().clone() if t is not None else None for t in torch_private.scaler_tensors(scaler))
        return ScaleState(scaler, scale, tracker)


@dataclass(slots=True)
class StepAttempt:
    """What is known of an attempt."""

    optimizer: Optimizer
    index: int
    step: int
    scaling: ScaleState | None
    losses: list[Tensor]
    norm: Tensor | None = None
    micro_batches: int = 0
    stepped: bool = False  #: the optimizer itself ran
    bad: bool = False  #: an incident was reported
    found_inf: list[Tensor] = field(default_factory=list)  #: of an optimizer that decides on the device
    norms: dict[str, Tensor] = field(default_factory=dict)  #: per parameter, likewise
    traced: str = ""  #: which execution of the step the trace holds
    judging_s: float = 0.0  #: what replays of it took
    kept: dict[str, lost_updates.Kept] = field(default_factory=dict)  #: half parameters before the step

    @property
    def scale(self) -> float | None:
        """The loss scale, read from the device; None without a scaler."""
        return float(self.scaling.scale) if self.scaling is not None and self.scaling.scale is not None else None

    @property
    def on_device(self) -> bool:
        """Whether the optimizer unscales and skips on the device."""
        return self.scaling is not None and torch_private.steps_on_device(self.optimizer)

    def mean_loss(self) -> Tensor | None:
        """Mean of the losses as one device scalar; None without any."""
        if len(self.losses) == 1 and self.losses[0].dim() == 0:
            return self.losses[0]
        means = [loss.float().mean() for loss in self.losses if loss.numel()]
        return torch.stack([mean.to(means[0].device) for mean in means]).mean() if means else None

    def loss_known_bad(self, parcels: list[Parcel]) -> bool:
        """Whether a loss is non-finite, as far as the host knows without waiting for the device."""
        known = [parcel.values() for parcel in parcels if parcel.arrived]
        return any(value is not None and value - value != 0 for values in known for value in values.values())


class StepRows:
    """Writes the rows of finished attempts, when their values have reached the host.

    Args:
        models: The watched models.
        recorder: Where rows go.
        readback: Brings the values.
    """

    def __init__(self, models: Models, recorder: Recorder, readback: Readback) -> None:
        self._models = models
        self._recorder = recorder
        self._readback = readback

    def due(self, attempt: StepAttempt) -> bool:
        """Whether this is one of the attempts whose gradients are recorded whatever becomes of them."""
        return attempt.step % gradients.RECORD_EVERY == 0

    def write(self, attempt: StepAttempt, *, seconds: float, observing: float) -> None:
        """Writes the step's row, and its gradients' where they are due (every so often, and when it went bad)."""
        if (attempt.bad or self.due(attempt)) and not attempt.on_device:
            self._write_gradients(attempt)
        scaling, ended = attempt.scaling, time.time()
        fetched: dict[str, Tensor | float | None] = {
            "loss": attempt.mean_loss(),
            "norm": attempt.norm,
            "scale": scaling.scale if scaling else None,
            "tracker": scaling.tracker if scaling else None,
            "found_inf": attempt.found_inf[0] if attempt.found_inf else None,
        }
        self._readback.fetch(
            fetched, lambda values: self._recorder.step(self._row(attempt, values, ended, seconds, observing))
        )

    def _row(self, attempt: StepAttempt, values: Values, ended: float, seconds: float, observing: float) -> StepRow:
        found, tracker, norm, lr = values["found_inf"], values["tracker"], values["norm"], _learning_rate(attempt)
        skipped = bool(found) if found is not None else not attempt.stepped
        return StepRow(
            step=attempt.step,
            optimizer=attempt.index,
            segment=self._recorder.segment,
            time=ended,
            loss=values["loss"],
            scale=values["scale"],
            growth_tracker=int(tracker) if tracker is not None else None,
            found_inf=skipped if attempt.scaling is not None else None,
            skipped=skipped,
            grad_norm=norm,
            lr=lr,
            micro_batches=attempt.micro_batches,
            duration_s=seconds,
            observing_s=observing,
            traced=attempt.traced,
        )

    def _write_gradients(self, attempt: StepAttempt) -> None:
        self._recorder.grads(
            gradients.rows(
                attempt.optimizer,
                self._models,
                self._recorder.params,
                step=attempt.step,
                index=attempt.index,
                unchanged=lost_updates.unchanged(attempt.kept),
            )
        )


def _learning_rate(attempt: StepAttempt) -> float | None:
    lr = attempt.optimizer.param_groups[0].get("lr")
    return float(lr) if lr is not None else None
