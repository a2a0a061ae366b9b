"""Gradients of an optimizer's watched parameters: norms of every step, magnitudes and culprits when asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Values
from ampscope.capture.torch_support.sharding import has_arrived, local
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.torch_private import past_modes
from ampscope.capture.tracing.light_statistics import extremes, finite, stored
from ampscope.trace.schema import GradRow, StateKind

#: Elements of a tensor that are compared from look to look.
SAMPLE = 1 << 12


class KeptInHalf(NamedTuple):
    """A parameter, or what an optimizer keeps of one, that has a half-precision dtype."""

    kind: StateKind
    parameter: nn.Parameter  #: whose update it is
    owner: str  #: the parameter's qualified name
    name: str  #: the same; of state what the optimizer calls it
    tensor: Tensor

    @property
    def key(self) -> tuple[str, str]:
        """The names of the parameter and of what is kept of it, by which the tensor is known."""
        return self.owner, self.name


def kept_in_half(optimizer: Optimizer, models: Models) -> Iterator[KeptInHalf]:
    """The half-precision weights of ``optimizer`` that have gradients, and its half-precision state of any weight."""
    view = OptimizerView(optimizer)
    for parameter, gradient in view.with_gradients:
        known = models.parameters.get(id(parameter))
        state = view.state.get(parameter)
        kept = state if isinstance(state, dict) else {}
        half = [(str(key), each) for key, each in kept.items() if type(each) is Tensor and each.dtype in HALF]
        if known is None or not (half or parameter.dtype in HALF):
            continue
        if type(parameter) is not nn.Parameter or not _is_plain(parameter) or not _is_plain(gradient):
            continue
        if parameter.dtype in HALF:
            yield KeptInHalf(StateKind.WEIGHT, parameter, known[0], known[0], parameter)
        for key, value in half:
            if value.shape == parameter.shape and _is_plain(value) and f"max_{key}" not in kept:  # the largest counts
                yield KeptInHalf(StateKind.OPTIMIZER, parameter, known[0], key, value)


def sampled(tensor: Tensor) -> Tensor:
    """A sample of a tensor's elements, the same ones of every tensor of its shape."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


class KeptValues(NamedTuple):
    """A parameter with a sample of its values before the optimizer stepped."""

    parameter: Tensor
    before: Tensor


def keep_values(optimizer: Optimizer, models: Models) -> dict[str, KeptValues]:
    """A sample of every half-precision parameter of ``optimizer`` that has a gradient and is to move, by name.

    Of an optimizer that is none of torch's, none: what it cannot write it may add to a later update (Kahan's sum). What
    a step of it is to write is found on copies, see `still_updates`.
    """
    found: dict[str, KeptValues] = {}
    view = OptimizerView(optimizer)
    if view.has_own_step:
        return found
    at_rest = view.at_rest
    for parameter in view.parameters:
        known = models.parameters.get(id(parameter))
        half = parameter.dtype in HALF and parameter.layout is torch.strided and parameter.numel()
        moves = parameter.grad is not None and id(parameter) not in at_rest
        if known is not None and half and moves and local(parameter).numel():
            found[known[0]] = KeptValues(parameter, sampled(local(parameter)).clone())
    return found


def lost_counts(kept: Mapping[str, KeptValues], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How many elements had a gradient, and how many of them the step left exactly as they were; no wait.

    Args:
        kept: The parameters before the step.
        earlier: Samples of them at the look before. What has moved since is not held: an optimizer that rounds by
            chance, or adds up what it could not write, leaves in one step as it is what it moves in many.
    """
    found = {}
    for name, (parameter, before) in kept.items():
        if parameter.grad is None or parameter.grad.layout is not torch.strided or not has_arrived(parameter.grad):
            continue
        moved = sampled(local(parameter.grad)) != 0
        same = (sampled(local(parameter)) == before) & moved
        if name in earlier and earlier[name].shape == before.shape:
            same &= earlier[name] == before
        found[f"due {name}"], found[f"same {name}"] = moved.sum(), same.sum()
    return found


def lost_share(known: Values, name: str) -> float | None:
    """The share of a parameter's due elements that were left as they were; None where none was due, or nobody looked.

    Args:
        known: What `lost_counts` gave, on the host.
        name: Of the parameter.
    """
    due, same = known.get(f"due {name}"), known.get(f"same {name}")
    return same / due if due and same is not None else None


#: Magnitudes of all gradients are recorded at one step in this many, and at every bad one; and once soon after the
#: first: by then an optimizer that begins gently has begun, and its weights can be held against the first look.
RECORD_EVERY, RECORDED_EARLY = 50, 16

_PLAIN, _STRIDED, _SINGLE = frozenset({Tensor}), frozenset({torch.strided}), frozenset({torch.float32})
_layout, _is_nested, _dtype, _device = map(attrgetter, ("layout", "is_nested", "dtype", "device"))
_requires_grad = attrgetter("requires_grad")


def is_recorded(step: int) -> bool:
    """Whether gradients of a step are recorded whatever becomes of it."""
    return step % RECORD_EVERY == 0 or step == RECORDED_EARLY


def owned(optimizer: Optimizer, models: Models) -> Iterator[tuple[str, Tensor]]:
    """Name and gradient of every watched parameter that has one in ``optimizer``; of a sharded one, this rank's."""
    for parameter, gradient in OptimizerView(optimizer).with_gradients:
        known = models.parameters.get(id(parameter))
        if known is not None:
            yield known[0], local(gradient)


def names(optimizer: Optimizer, models: Models) -> frozenset[str]:
    """Names of the watched parameters that have a gradient in ``optimizer``."""
    return frozenset(name for name, _ in owned(optimizer, models))


def trained_by(optimizer: Optimizer, models: Models) -> frozenset[str]:
    """Names of the watched parameters that ``optimizer`` holds."""
    known = (models.parameters.get(id(each)) for each in OptimizerView(optimizer).parameters)
    return frozenset(each[0] for each in known if each is not None)


def total_norm(optimizer: Optimizer) -> Tensor | None:
    """L2 norm of all gradients of ``optimizer`` as a device scalar (float32); None without any.

    Where gradients are sharded, that of the shards on this rank; of sparse ones, that of the values as they are stored.
    """
    dense = OptimizerView(optimizer).gradients
    if not _are_plain(dense):
        dense = [values for each in dense if _is_dense(values := stored(local(each)))]
    if not dense:
        return None
    home = dense[0].device
    past_dispatch, past_functions = past_modes(dense)
    with past_dispatch, past_functions:
        if any(map(_requires_grad, dense)):  # of a backward that makes a graph
            dense = [each.detach() for each in dense]
        norms = list(torch._foreach_norm(dense))
        if set(map(_dtype, norms)) != {torch.float32} or set(map(_device, norms)) != {home}:
            known = _without_overflow(dense, norms)
            norms = [norm.to(home, torch.float32, non_blocking=True) for norm in known]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether each is torch's own dense tensor; asked of all gradients in every step."""
    strided = _PLAIN.issuperset(map(type, tensors)) and _STRIDED.issuperset(map(_layout, tensors))
    return strided and not any(map(_is_nested, tensors))


def _without_overflow(tensors: list[Tensor], norms: Sequence[Tensor]) -> Iterator[Tensor]:
    """The norms, of half precision in float32: the norm of finite numbers there need not fit their dtype."""
    for tensor, norm in zip(tensors, norms, strict=True):
        yield torch.linalg.vector_norm(tensor, dtype=torch.float32) if norm.dtype in HALF else norm


def non_finite(optimizer: Optimizer, models: Models) -> list[str]:
    """Names of the parameters whose gradients are not finite; waits for the device."""
    return [name for name, gradient in owned(optimizer, models) if not finite(gradient)]


def norms_by_name(optimizer: Optimizer, models: Models) -> dict[str, Tensor]:
    """L2 norm of each watched parameter's gradient as a device scalar."""
    parameters, known = OptimizerView(optimizer).parameters, models.parameters
    if not hasattr(optimizer, "given"):
        plain = [(known[id(p)][0], g) for p in parameters if (g := p.grad) is not None and id(p) in known]
        dense = [gradient for _, gradient in plain]
        if plain and _are_plain(dense) and _SINGLE.issuperset(map(_dtype, dense)):
            with torch.no_grad():  # of most models, in every step of a fused optimizer: no call for each
                return dict(zip([name for name, _ in plain], torch._foreach_norm(dense), strict=True))
    found = [(name, values) for name, each in owned(optimizer, models) if _is_dense(values := stored(each))]
    with torch.no_grad():
        gradients = [gradient for _, gradient in found]
        norms = list(_without_overflow(gradients, torch._foreach_norm(gradients))) if found else []
    return {name: norm for (name, _), norm in zip(found, norms, strict=True)}


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and has_arrived(gradient)


class GradientMagnitudes(NamedTuple):
    """The figures that are recorded of each gradient, as device scalars."""

    sizes: dict[str, int]  #: elements of each, by name of the parameter
    values: dict[str, Tensor]  #: of each, its extremes and how many elements are not zero

    def rows(self, known: Values, params: Mapping[str, int], *, step: int, index: int) -> list[GradRow]:
        """A row for each gradient.

        Args:
            known: The values, on the host, with those of `lost_counts`.
            params: Numbers of the parameters.
            step: Of the optimizer.
            index: Number of the optimizer.
        """
        found = []
        for name, size in self.sizes.items():
            low, high = known[f"low {name}"] or 0.0, known[f"high {name}"] or 0.0
            bad = not math.isfinite(low) or not math.isfinite(high)
            largest = None if bad else max(abs(low), abs(high))
            zeros = 1.0 - (known[f"nonzero {name}"] or 0.0) / size
            found.append(GradRow(step, index, params[name], largest, bad, zeros, lost_share(known, name)))
        return found


def magnitudes(optimizer: Optimizer, models: Models) -> GradientMagnitudes:
    """Measures what is recorded of each unscaled gradient; no wait."""
    found = GradientMagnitudes({}, {})
    for name, gradient in owned(optimizer, models):
        if _is_dense(gradient) and gradient.numel():
            found.sizes[name] = gradient.numel()
            found.values[f"low {name}"], found.values[f"high {name}"] = extremes(gradient)
            found.values[f"nonzero {name}"] = gradient.detach().count_nonzero()
    return found
