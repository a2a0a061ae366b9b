"""The functions of torch through which ``torch.func`` calls a model: the private names that AMPscope stands for.

Everything that ``vmap``, ``grad``, ``jacrev`` and the like return looks these up by name when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

#: Functions that run a user's function under a transform: module, name, and where its arguments hold those of the user.
TRANSFORMS = (
    ("torch._functorch.apis", "vmap_impl", slice(5, None)),
    ("torch._functorch.eager_transforms", "grad_impl", slice(3, 4)),
    ("torch._functorch.eager_transforms", "grad_and_value_impl", slice(3, 4)),
    ("torch._functorch.eager_transforms", "_vjp_with_argnums", slice(1, None)),
    ("torch._functorch.eager_transforms", "_jvp_with_argnums", slice(1, 2)),
)
#: The one whose result holds a function that goes on with what was computed.
PULLBACK = "_vjp_with_argnums"
#: The one whose result holds gradients, and the value that they are of.
VALUED = "grad_and_value_impl"


class Transform(NamedTuple):
    """A function of torch that runs a user's function under a transform."""

    home: Any  #: module in which it is looked up
    name: str
    inputs: slice  #: of its positional arguments: what the user gave


def transforms() -> Iterator[Transform]:
    """Yields the transforms in `TRANSFORMS` that the installed torch has."""
    for home, name, inputs in TRANSFORMS:
        module = sys.modules.get(home)
        if module is not None and callable(getattr(module, name, None)):
            yield Transform(module, name, inputs)


def functional_home() -> tuple[Any, str] | None:
    """Returns the place of the function that ``torch.func.functional_call`` calls, as module and name; None if gone."""
    home, name = nn.utils.stateless, "_functional_call"
    return (home, name) if callable(getattr(home, name, None)) else None


def given(args: tuple[Any, ...], inputs: slice) -> tuple[Any, ...]:
    """Returns the arguments that the user gave, out of the positional arguments of a torch function."""
    values = args[inputs]
    return values[0] if len(values) == 1 and type(values[0]) is tuple else values


def value_of(function: Any, result: Any) -> torch.Tensor | None:
    """The value that was differentiated, as far as what a transform returned has it beside the gradients."""
    if getattr(function, "__name__", "") != VALUED or not isinstance(result, tuple) or len(result) != 2:
        return None
    value = result[1][0] if isinstance(result[1], tuple) and result[1] else result[1]
    return value.detach() if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform that is running: it stands for a batch, or is being differentiated."""
    ask = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return ask is not None and bool(ask(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the user's own tensor, for the one that stands for it inside transforms."""
    take = getattr(torch._C._functorch, "get_unwrapped", None)
    while take is not None and is_wrapped(tensor):
        tensor = take(tensor)
    return tensor


def whole_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor behind one inside transforms, mapped dimensions first; any other tensor as it is."""
    mapped_over = getattr(torch._C._functorch, "maybe_get_bdim", None)
    take = getattr(torch._C._functorch, "get_unwrapped", None)
    if mapped_over is None or take is None or not is_wrapped(tensor):
        return tensor
    dim, inside = mapped_over(tensor), whole_batch(take(tensor))
    outer = inside.dim() - tensor.dim() - (dim >= 0)  # dimensions that transforms further out have put first
    return inside.movedim(outer + dim, 0) if dim >= 0 else inside


def innermost(function: Any) -> Callable[..., Any]:
    """The user's function inside transforms of it and inside ``partial``."""
    for _ in range(16):
        inside = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if not callable(inside):
            break
        function = inside
    return function  # type: ignore[no-any-return]
