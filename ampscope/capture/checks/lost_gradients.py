"""Signs of gradients that were lost to precision, and how much of them is missing beside a float32 replay's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import StepAttempt
from ampscope.capture.step import gradients
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel, Values
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.sites import dtype_name
from ampscope.provenance import LOST_SHARE
from ampscope.trace.dtypes import FINFO

#: Elements of a gradient that are compared at once, for what that takes beside it.
_AT_ONCE = 1 << 22


class Sign(NamedTuple):
    """Signs that a parameter's gradient has lost something to precision, from the gradient alone."""

    zeros: float  #: share of elements that are exactly zero
    tiny: bool  #: its largest element, times the loss scale, is below what half precision holds well


class Largest:
    """The largest element of every gradient as backward left it, on its way to the host."""

    def __init__(self, models: Models) -> None:
        given = ((name, parameter.grad) for name, parameter in models.parameters.values())
        found = [(name, local(gradient)) for name, gradient in given if gradient is not None]
        self._parcel = Parcel(dict(_largest([(name, each) for name, each in found if _is_comparable(each)])))

    def values(self) -> Values:
        """Returns the values by parameter, with the loss scale in them; waits for what has not arrived."""
        return self._parcel.values()


class Signs:
    """The signs of loss to precision that an optimizer's gradients show, on their way to the host.

    Args:
        optimizer: Whose gradients.
        models: The watched models.
        scale: The loss scale; None without a scaler.
        scaled: The gradients carry it still.
        before: What they were when backward had ended; None where nobody looked.
    """

    def __init__(
        self, optimizer: Optimizer, models: Models, scale: Tensor | None, before: Largest | None, *, scaled: bool
    ) -> None:
        found = [(name, g) for name, g in gradients.owned(optimizer, models) if _is_comparable(g)]
        self._models = models
        self._scaled = scaled
        self._before = before
        self._sizes = {name: gradient.numel() for name, gradient in found}
        nonzero = {f"nonzero {name}": gradient.count_nonzero() for name, gradient in found}
        most = {f"most {name}": norm for name, norm in _largest(found)}
        self._parcel = Parcel({**nonzero, **most, "scale": scale})

    @property
    def scale(self) -> float | None:
        """The loss scale; waits for what has not arrived."""
        return self._parcel.values()["scale"]

    def suspicious(self, dtypes: Iterable[torch.dtype]) -> dict[str, Sign]:
        """The parameters whose gradient may have lost something; waits for what has not arrived.

        Of an embedding, which has no gradient for what the batch does not mention, only one that is zero throughout
        counts.

        Args:
            dtypes: Of half precision, in which the step computed. Gradients that stay below the smallest normal number
                of one may have lost a part of themselves.
        """
        floor = max((FINFO[dtype_name(dtype)].smallest_normal for dtype in dtypes), default=0.0)
        looked_up, known, given = _looked_up(self._models), self._parcel.values(), self._given()
        found = {}
        for name, size in self._sizes.items():
            sign = Sign(1.0 - (known[f"nonzero {name}"] or 0.0) / size, 0.0 < given[name] < floor)
            if sign.tiny or sign.zeros > (LOST_SHARE if name not in looked_up else 1.0 - 0.5 / size):
                found[name] = sign
        return found

    def factors(self) -> dict[str, float]:
        """Returns by how much the loop has scaled each gradient since backward (clipping), by its largest element."""
        now = self._most()
        return {name: now[name] / most for name, most in self._given().items() if 0.0 < most < math.inf}

    def _most(self) -> dict[str, float]:
        """The largest element of each gradient, with the loss scale in it."""
        factor, known = 1.0 if self._scaled else self.scale or 1.0, self._parcel.values()
        return {name: (known[f"most {name}"] or 0.0) * factor for name in self._sizes}

    def _given(self) -> dict[str, float]:
        """The largest element of each gradient as backward left it, as far as that is known, else as `_most`."""
        before = self._before.values() if self._before is not None else {}
        return {name: before.get(name) or most for name, most in self._most().items()}


def lost_shares(
    ours: Mapping[str, Tensor], wide: Mapping[str, Tensor], factors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The share of each gradient's mass that is missing, of those that miss more than `LOST_SHARE`.

    Args:
        ours: Gradients of half precision by parameter.
        wide: Those of float32.
        factors: What ``ours`` were multiplied with since; 1 where none is given.
    """
    shares = {}
    for name, gradient in wide.items():
        half = ours.get(name)
        if half is not None and _is_comparable(half) and half.shape == gradient.shape:
            share = _missing(half, gradient, (factors or {}).get(name) or 1.0)
            if share > LOST_SHARE:
                shares[name] = share
    return shares


def _largest(found: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The largest magnitude of each gradient, as a device scalar."""
    norms = torch._foreach_norm([gradient for _, gradient in found], math.inf) if found else ()
    return zip((name for name, _ in found), norms, strict=True)


def total_norm(found: Mapping[str, Tensor]) -> float:
    """L2 norm of all gradients; waits for the device."""
    return float(sum(float(g.float().norm()) ** 2 for g in found.values() if _is_comparable(g)) ** 0.5)


def _missing(half: Tensor, wide: Tensor, factor: float) -> float:
    whole = kept = zeroed = 0.0
    rows = max(1, _AT_ONCE * len(wide) // wide.numel()) if wide.dim() else 1
    parts = zip(torch.split(wide, rows), torch.split(half, rows), strict=True) if wide.dim() else [(wide, half)]
    for sizes, ours in ((part.detach().abs(), each.detach()) for part, each in parts):
        whole, kept = whole + _sum(sizes), kept + _sum(ours.abs()) / factor
        zeroed += _sum(sizes.masked_fill_(ours != 0, 0.0))
    if not (0.0 < whole < math.inf and math.isfinite(kept)):
        return 0.0
    return max(zeroed, whole - kept) / whole


def _sum(sizes: Tensor) -> float:
    return float(sizes.sum(dtype=torch.float64))


def _looked_up(models: Models) -> frozenset[str]:
    """Names of the weights of embeddings."""
    weights = [module.weight for module in models.modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return frozenset(models.parameters[id(weight)][0] for weight in weights if id(weight) in models.parameters)


def _is_comparable(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel() > 0


#: Gradients that are smaller by this factor than those of an earlier look, at a loss that has fallen by the other one,
#: belong to a training that has come to its end.
_CONVERGED, _FALLEN = 0.05, 0.2


class Progress:
    """The largest gradients and the highest loss of the steps that were looked at.

    Attributes:
        largest: Norm of all gradients at any look.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._highest = 0.0  # loss, likewise

    def note(self, attempt: StepAttempt) -> float:
        """Notes the sizes of gradients and loss; returns the loss, NaN where it is not known. Waits for the device."""
        norm = norm_of(attempt)
        if norm is not None:
            self.saw(attempt.opened.number(norm))
        loss = attempt.opened.known_loss()
        if loss is None:
            mean = attempt.opened.mean_loss()
            loss = float(mean) if mean is not None else math.nan
        self._highest = max(self._highest, loss if math.isfinite(loss) else 0.0)
        return loss

    def saw(self, norm: float) -> None:
        """Notes the norm of all gradients."""
        self.largest = max(self.largest, norm)

    def has_ended(self, norm: float, loss: float) -> bool:
        """Whether a step with these gradients and this loss belongs to a training that has come to its end."""
        return norm < _CONVERGED * self.largest and loss < _FALLEN * self._highest


def norm_of(attempt: StepAttempt) -> Tensor | None:
    """The norm of all gradients of a step, on the device; None where nobody measured it."""
    return attempt.norm if attempt.norm is not None else attempt.opened.norms.get(id(attempt.optimizer))
