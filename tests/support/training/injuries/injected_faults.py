"""Makes any function of capture raise at one of its calls; which there are is found by walking the package."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, cast

import pytest

import ampscope.capture


class Function(NamedTuple):
    """A function or method of capture, a property's getter included."""

    module: str
    owner: str  #: class; empty for a function
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module.removeprefix("ampscope.capture."), self.owner, self.name)))

    @property
    def home(self) -> Any:
        module = importlib.import_module(self.module)
        return getattr(module, self.owner) if self.owner else module

    @property
    def held(self) -> Any:
        return vars(self.home)[self.name]

    @property
    def code(self) -> CodeType:
        found = _code(self.held)
        assert found is not None
        return found


def _function(held: Any) -> Any:
    held = held.fget if isinstance(held, property) else held
    return held.__func__ if isinstance(held, staticmethod | classmethod) else held


def _code(held: Any) -> CodeType | None:
    """Of what was written in capture, whatever wraps it (a cache, a context manager, torch); None of all else."""
    held = _function(held)
    while held is not None:
        code = getattr(held, "__code__", None)
        if code is not None and code.co_filename.startswith(ampscope.capture.__path__[0]):
            return cast(CodeType, code)
        held = getattr(held, "__wrapped__", None)
    return None


def _modules() -> Iterator[ModuleType]:
    for each in pkgutil.walk_packages(ampscope.capture.__path__, "ampscope.capture."):
        with contextlib.suppress(ImportError):  # kernels for a device that is not here
            yield importlib.import_module(each.name)


def functions() -> Iterator[Function]:
    """All that are written in capture."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for method, held in vars(value).items():
                    if _code(held) is not None:
                        yield Function(module.__name__, name, method)
            elif getattr(value, "__module__", "") == module.__name__ and _code(value) is not None:
                yield Function(module.__name__, "", name)


@contextlib.contextmanager
def counted(calls: Counter[int]) -> Iterator[None]:
    """Counts the calls of every function, by ``id`` of its code, while the body runs."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[id(frame.f_code)] += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)


class Fault:
    """Has a function raise at its ``at``-th call, once it is `armed`."""

    def __init__(self, function: Function, at: int, error: type[BaseException]) -> None:
        self.calls = 0
        self.armed = False
        self._function = function
        self._at = at
        self._error = error

    @contextlib.contextmanager
    def injected(self) -> Iterator[Fault]:
        home, held, name = self._function.home, self._function.held, self._function.name
        failing = self._failing(_function(held))
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(held, property):
                patch.setattr(home, name, property(failing, held.fset))
            elif isinstance(held, staticmethod | classmethod):
                patch.setattr(home, name, type(held)(failing))
            elif not inspect.ismodule(home):
                patch.setattr(home, name, failing)
            else:
                for module in _modules():
                    for alias in [alias for alias, value in vars(module).items() if value is held]:
                        patch.setattr(module, alias, failing)
            yield self

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.calls += 1
                if self.calls == self._at:
                    raise self._error("injected")
            return function(*args, **kwargs)

        return failing
