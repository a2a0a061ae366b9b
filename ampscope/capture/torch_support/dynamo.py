"""Keeps Dynamo, the compiler behind ``torch.compile``, out of AMPscope's own code; has its private names.

It would come in by two doors. Below a compiled function that broke its graph, every Python frame is offered to it: the
code of AMPscope is marked to be left alone, and what the user's code calls through it is compiled as ever. And where it
traces the user's code and meets a call of ours, that call would become part of the graph: such functions ask
``torch.compiler.is_compiling()``, which it knows when it traces, and do only what torch would have done.

Nothing here imports Dynamo, which takes seconds: where it is not loaded, nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = "ampscope"
F = TypeVar("F", bound=Callable[..., Any])

_set_eval_frame = getattr(torch._C._dynamo.eval_frame, "set_eval_frame", None)  # asked for at every entry into our own
_left_alone: set[str] = set()  # names of the modules whose code is marked


def _eval_frame() -> ModuleType | None:
    return sys.modules.get("torch._dynamo.eval_frame")


def in_use() -> bool:
    """Whether ``torch.compile`` was used in this process."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(map(callable, backends.values()))


def graphs_compiled() -> int:
    """How many graphs Dynamo has compiled in this process; 0 where that is not known."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def optimized_module() -> Any | None:
    """The class of what ``torch.compile`` makes of a module; None where Dynamo is not loaded."""
    return getattr(_eval_frame(), "OptimizedModule", None)


def tie(module: Any, watch: object) -> None:
    """Has ``watch`` live as long as what ``torch.compile`` made of a module, which must keep its class (None: no more).

    It goes to the function that runs the module, where no state, copy or pickle of the module has it.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, FunctionType):
        vars(forward).pop("ampscope_watch", None)
        if watch is not None:
            forward.ampscope_watch = watch  # type: ignore[attr-defined]  # functions take any


#: Says what Dynamo does with the frames of this thread from here on (None: nothing); returns what it did before.
let_see: Callable[[Any], Any] = _set_eval_frame if _set_eval_frame is not None else lambda _: None


def breaks_graph(function: F) -> F:
    """Has Dynamo call ``function`` between two graphs instead of tracing it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable marks
    return function


def leave_own_code_alone() -> None:
    """Marks the code of AMPscope's modules, those that were loaded since the last time."""
    skip = getattr(_eval_frame(), "skip_code", None)
    if skip is None:
        return
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] == PACKAGE and name not in _left_alone:
            _left_alone.add(name)
            for code in set(_codes_of(module)):
                skip(code)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            yield from _codes_in(member, module.__name__)


def _codes_in(value: Any, home: str) -> Iterator[CodeType]:
    """The code of a function, method or property, and of what is defined inside it."""
    for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))):
        if isinstance(function, FunctionType) and function.__module__ == home:
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """A dispatch mode whose handler torch calls without a detour."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch wraps the handler in two more calls, to keep Dynamo out of it; it is kept out anyway."""
        return False
