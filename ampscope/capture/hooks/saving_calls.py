"""The functions that write files of tensors say so, and to which file: ``torch.save`` and ``save_file`` of safetensors.

What they return and raise, and what they are told to be called with, stay as they were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from io import BufferedRandom, BufferedWriter, FileIO
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from ampscope.capture.torch_support import guard, torch_private

T = TypeVar("T")
_SAFETENSORS = "safetensors.torch"
#: Files as ``open`` gives them for bytes, which know their path.
_OPENED = (BufferedWriter, BufferedRandom, FileIO)


def owners() -> Iterator[ModuleType]:
    """Yields the modules that hold such a function; safetensors where the process has loaded it."""
    yield from (torch.serialization, torch)
    if _SAFETENSORS in sys.modules:
        yield sys.modules[_SAFETENSORS]


def name_in(owner: ModuleType) -> str:
    """The name that the function has in a module."""
    return "save_file" if owner.__name__ == _SAFETENSORS else "save"


def announced(save: Callable[..., T], saved: Callable[[object, object], None]) -> Callable[..., T]:
    """A function that saves, and then says what it has saved, and where.

    Args:
        save: The function; what it saves and where to are its first two arguments.
        saved: Is told; a fault of it reaches nobody.
    """

    @wraps(save)
    def announced(*args: object, **kwargs: object) -> T:
        result = save(*args, **kwargs)
        if not (torch_private.is_tracing() or guard.here.working):
            guard.tell(_tell, saved, args, kwargs)
        return result

    return announced


def _tell(saved: Callable[[object, object], None], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    given = dict(enumerate(args))
    held = given.get(0, kwargs.get("obj", kwargs.get("tensors")))
    target = given.get(1, kwargs.get("f", kwargs.get("filename")))
    saved(held, target)


def path_of(target: object) -> str | None:
    """The absolute path of the file that was saved to; None of what is no file, or does not say which."""
    if isinstance(target, _OPENED):
        target = target.name
    if not isinstance(target, (str, bytes, os.PathLike)):
        return None
    return str(Path(os.fsdecode(target)).absolute())
