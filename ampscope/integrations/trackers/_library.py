"""Imports the library of a tracker, or says which extra brings it."""

from __future__ import annotations

import importlib
from typing import Any

from ampscope.errors import WatchError


def library(module: str, extra: str) -> Any:
    """The module of that name.

    Args:
        module: Its full name.
        extra: Of AMPscope, that installs it.

    Raises:
        WatchError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WatchError(f"{module} cannot be imported ({error}); pip install 'ampscope[{extra}]'") from error
