"""Computes in float32 inside an autocast region: one forward (`in_float32`), or modules by name (`keep_fp32`)."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.models import unwrapped, without_wrappers
from ampscope.errors import KeepError

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def in_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as a function that computes in float32 whatever autocast region it is called in.

    Autocast is off inside, tensors in half precision among the arguments come in as float32, and what is returned
    stays as it came out: autocast casts it again where an op asks for it. Gradients flow through the casts.

    Args:
        forward: Any callable, e.g. the bound ``forward`` of a module with float32 parameters.
    """
    kinds = call_state.device_types()

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _run(forward, args, kwargs, kinds)

    return call


def keep_fp32(model: nn.Module, names: str | Sequence[str]) -> KeptModules:
    """Keeps modules of ``model`` in float32 inside autocast regions, until the handle is removed.

    Each call of a named module runs with autocast off and with float16 and bfloat16 tensors among its arguments cast
    to float32: in tuples, lists, dicts and dataclasses too, while other objects (a key-value cache) go in as they are.
    Its output stays float32; autocast casts it again where the next op asks for it. Outside autocast, modules of
    float32 parameters compute what they always did.

    Classes, parameters and ``state_dict`` stay as they are. Copies and pickles of the model keep its modules in
    float32; loading such a pickle (not a ``state_dict``) needs AMPscope. What goes past a module's call, such as a
    parent that reads its weights or the replicas of ``DataParallel``, is not reached.

    Args:
        model: The model, wrapped (``DistributedDataParallel``, ``torch.compile``) or not.
        names: Qualified names as in ``model.named_modules()`` or in a diagnosis, or patterns in which ``*``, ``?`` and
            ``[...]`` match within one part: ``"blocks.*.attn"``. ``""`` is the model itself.

    Returns:
        A handle with ``remove()``; also a context manager.

    Raises:
        KeepError: A name fits no module, or the module cannot be kept in float32; nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise KeepError(f"keep_fp32 needs a torch.nn.Module, not {type(model).__name__}")
    known = _modules_by_name(model)
    chosen: dict[str, nn.Module] = {}
    for name in [names] if isinstance(names, str) else names:
        chosen |= _matching(name, known)
    return KeptModules(chosen)


def kept(modules: Mapping[str, nn.Module]) -> KeptModules:
    """Keeps modules that are at hand in float32, each by its name; see `keep_fp32`.

    Raises:
        KeepError: One of them cannot be kept in float32; nothing was changed.
    """
    for name, module in modules.items():
        _check(name, module)
    return KeptModules(modules)


class KeptModules:
    """Modules that are kept in float32; leaving it as a context manager ends that.

    Attributes:
        names: Qualified names of the modules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = tuple(modules)
        once = {id(module): module for module in modules.values()}
        self._forwards = [_kept_forward(module) for module in once.values()]

    def remove(self) -> None:
        """Lets the modules compute as before, unless another handle keeps them. Safe to call twice."""
        while self._forwards:
            self._forwards.pop().let_go()

    def __enter__(self) -> KeptModules:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<ampscope.keep_fp32 {', '.join(map(repr, self.names))}{'' if self._forwards else ', removed'}>"


class Float32Forward:
    """The ``forward`` of a module that is kept in float32, held by the module itself.

    An object instead of a function: a copy of the module gets one of its own, which calls the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.holds = 0  #: handles that keep the module
        self._module = module
        self.other = vars(module).get("forward")  #: a forward that someone else put into the module
        self._kinds = call_state.device_types()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        return _run(self.plain, args, kwargs, self._kinds) if self.holds else self.plain(*args, **kwargs)

    def let_go(self) -> None:
        """One handle less; without any, the module gets its own forward back."""
        self.holds -= 1
        held = vars(self._module)
        if self.holds or held.get("forward") is not self:  # wrapped by someone else meanwhile: passes through
            return
        if self.other is None:
            del held["forward"]
        else:
            held["forward"] = self.other

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the module has without this."""
        if self.other is not None:
            return self.other(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward, whose signature this one has."""
        return self.other if self.other is not None else type(self._module).forward.__get__(self._module)

    @property
    def __func__(self) -> Any:
        """As of a bound method: the function that the user wrote."""
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)


def _kept_forward(module: nn.Module) -> Float32Forward:
    held = vars(module)
    kept = held.get("forward")
    if not isinstance(kept, Float32Forward):
        kept = held["forward"] = Float32Forward(module)
    kept.holds += 1
    return kept


# -- computing in float32 ---------------------------------------------------------------------------------------------


def _run(forward: Callable[..., Any], args: Any, kwargs: Any, kinds: tuple[str, ...]) -> Any:
    """Calls ``forward`` outside of autocast; recursive and without an exit stack, so that torch.compile follows."""
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _run(forward, args, kwargs, kinds)
    return forward(*_widened(args), **_widened(kwargs))


def _widened(value: Any) -> Any:
    """``value`` with its half-precision tensors in float32; itself where it holds none, so that edits to it last."""
    if isinstance(value, Tensor):
        return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value
    if not _holds_half(value):
        return value
    if isinstance(value, tuple):
        items = [_widened(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [_widened(item) for item in value]
    if type(value) is dict:
        return {key: _widened(item) for key, item in value.items()}
    return _widened_fields(value)


def _widened_fields(value: Any) -> Any:
    """A dataclass, or a dict of a class of its own (both at once, as outputs of transformers), with wider tensors."""
    copied = copy.copy(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _widened(getattr(value, field.name)))
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(copied, key, _widened(item))
    return copied


def _holds_half(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in _WIDER
    if isinstance(value, (tuple, list)):
        return any(_holds_half(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_half(item) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_holds_half(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


# -- finding the modules ----------------------------------------------------------------------------------------------


def _modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under its name with and without wrappers (``module.blocks.0``, ``blocks.0``)."""
    found = {}
    for root in (model, unwrapped(model)):
        for name, module in root.named_modules(remove_duplicate=False):
            found[name] = found[without_wrappers(name)] = unwrapped(module)
    return found


def _matching(name: Any, known: dict[str, nn.Module]) -> dict[str, nn.Module]:
    if not isinstance(name, str):
        raise KeepError(f"keep_fp32 takes names of modules, not {type(name).__name__}: keep_fp32(model, ['blocks.0'])")
    if name in known:
        _check(name, known[name])
        return {name: known[name]}
    fitting = {full: module for full, module in known.items() if _fits(full, name) and _is_called(module)}
    if not fitting:
        raise KeepError(f"the model has no module {name!r}{_near(name, known)}")
    for full, module in fitting.items():
        _check(full, module)
    return fitting


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _near(name: str, known: dict[str, nn.Module]) -> str:
    last = name.rpartition(".")[2]
    near = dict.fromkeys(difflib.get_close_matches(name, known, n=3))
    near |= dict.fromkeys(full for full in known if last and full.rpartition(".")[2] == last)
    shown = ", ".join(repr(full) for full in list(near)[:3])
    return f"; near it: {shown}" if shown else "; model.named_modules() lists them"


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules have none."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented" or "forward" in vars(module)


def _check(name: str, module: nn.Module) -> None:
    shown = repr(name) if name else "the model"
    if not _is_called(module):
        raise KeepError(f"{shown} is a {type(module).__name__}, which is never called; name what it holds: '{name}.*'")
    if isinstance(module, torch.jit.ScriptModule):
        raise KeepError(f"{shown} is a TorchScript module, whose precision is fixed; keep the module it was made from")
    for leaf, parameter in _half_parameters(module):
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise KeepError(
            f"{shown} holds {dtype} parameters ({leaf}), and keep_fp32 does not change weights; "
            f"keep the model itself in float32, model.float(), and leave lower precision to autocast"
        )


def _half_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.dtype in _WIDER)
