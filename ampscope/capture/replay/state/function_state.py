"""The state that functions reach outside their arguments; a replay puts it back."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ampscope.capture.replay.state.put_back import PutBack
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def keep_function_state(functions: Iterator[Callable[..., Any]], put_back: PutBack) -> None:
    """Keeps what functions can change besides their arguments: closure cells, globals, the object of a method.

    Args:
        functions: The functions that are about to run again.
        put_back: Takes it.
    """
    for function in functions:
        owner = getattr(function, "__self__", None)
        if owner is not None and is_plain_object(owner):
            put_back.keep(owner)
            for value in list(vars(owner).values()):
                _keep_value(value, put_back)
        plain = getattr(getattr(function, "__func__", function), "func", getattr(function, "__func__", function))
        code = getattr(plain, "__code__", None)
        if code is not None:
            for cell in plain.__closure__ or ():
                with Suppressed():  # a cell may be empty
                    _keep_cell(cell, cell.cell_contents, put_back)
            for name in code.co_names:
                if name in plain.__globals__:
                    _keep_global(plain.__globals__, name, put_back)


def _keep_cell(cell: types.CellType, value: Any, put_back: PutBack) -> None:
    put_back.by(lambda: setattr(cell, "cell_contents", value))
    _keep_value(value, put_back)


def _keep_global(home: dict[str, Any], name: str, put_back: PutBack) -> None:
    value = home[name]
    if isinstance(value, _PLAIN) or container_kind(value) is not None:
        put_back.by(lambda: home.__setitem__(name, value))
    _keep_value(value, put_back)


def _keep_value(value: Any, put_back: PutBack) -> None:
    if not isinstance(value, _PLAIN):
        put_back.keep(value)


def functions_of(modules: list[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The forwards of modules and every hook on them."""
    for module in modules:
        yield module.forward
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from getattr(module, name, {}).values()
