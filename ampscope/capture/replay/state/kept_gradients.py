"""Leaves the gradients of a model as a replay found them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ampscope.capture.torch_support.models import Models


@contextlib.contextmanager
def gradients_kept(models: Models) -> Iterator[None]:
    """Puts back every ``.grad`` in case a module holds a parameter where no substitute reaches it."""
    kept = [(parameter, parameter.grad) for _, parameter in models.parameters.values()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
