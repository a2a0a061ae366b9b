"""`in_float32` and `keep_fp32` compute in float32 inside an autocast region: one forward, or modules by name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import call_state
from ampscope.capture.torch_support.models import unwrapped, without_wrappers
from ampscope.capture.torch_support.tensor_tree import cast, holds
from ampscope.errors import KeepError


class HeldForward:
    """Stands in the place of a module's ``forward``; an object instead of a function, so that a copy gets its own."""

    travels = True  #: copies and pickles of the module have it, too

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.other = vars(module).get("forward")  #: a forward that someone else put into the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        raise NotImplementedError

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the module has without this."""
        if self.other is not None:
            return self.other(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def leave(self) -> None:
        """Gives the module its own forward back, unless someone else has wrapped this one meanwhile."""
        held = vars(self._module)
        if held.get("forward") is not self:
            return
        if self.other is None:
            del held["forward"]
        else:
            held["forward"] = self.other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy; of one that does not travel, the forward that the module's copy has without it."""
        if self.travels:
            return super().__reduce_ex__(protocol)
        return getattr, ((self._module, "forward") if self.other is None else (self.other, "__call__"))

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward, whose signature this one has."""
        return self.other if self.other is not None else type(self._module).forward.__get__(self._module)

    @property
    def __func__(self) -> Any:
        """The function that the user wrote, as a bound method has it."""
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)

    @property
    def __code__(self) -> Any:
        """The user function's code, for those who read it (``torch.jit.script``, ``torch.export``)."""
        return self.__func__.__code__

    @property
    def __globals__(self) -> Any:
        """The user function's globals; see ``__code__``."""
        return self.__func__.__globals__

    @property
    def __closure__(self) -> Any:
        """The user function's closure; see ``__code__``."""
        return self.__func__.__closure__

    @property
    def __defaults__(self) -> Any:
        """The user function's defaults; see ``__code__``."""
        return self.__func__.__defaults__

    @property
    def __kwdefaults__(self) -> Any:
        """The user function's keyword defaults; see ``__code__``."""
        return self.__func__.__kwdefaults__


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def in_float32(forward: Callable[..., Any], outputs: ModuleOutputs | None = None) -> Callable[..., Any]:
    """``forward`` as a function that computes in float32 whatever autocast region it is called in.

    Autocast is off inside, tensors in half precision among the arguments come in as float32, and what is returned
    stays as it came out: autocast casts it again where an op asks for it. Gradients flow through the casts.

    Args:
        forward: Any callable, e.g. the bound ``forward`` of a module with float32 parameters.
        outputs: How what it returns is given back; None: in float32.
    """
    kinds = call_state.device_types()

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(forward, args, kwargs, kinds, outputs)

    return call


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module has where it is not kept in float32."""
    held = module.forward
    return held.plain if isinstance(held, Float32Forward) else held


def keep_fp32(model: nn.Module, names: str | Sequence[str], *, outputs: torch.dtype | None = None) -> KeptModules:
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
        outputs: ``torch.float16`` or ``torch.bfloat16``: what the modules return has this dtype inside an autocast
            region of that dtype, for code that needs it. Values beyond its range become infinite.

    Returns:
        A handle with ``remove()``; also a context manager.

    Raises:
        KeepError: A name fits no module, or the module cannot be kept in float32; nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise KeepError(f"keep_fp32 needs a torch.nn.Module, not {type(model).__name__}")
    if outputs not in (None, torch.float16, torch.bfloat16):
        raise KeepError(f"outputs={outputs!r}: give torch.float16 or torch.bfloat16, or leave it out for float32")
    known = _modules_by_name(model)
    chosen: dict[str, nn.Module] = {}
    for name in [names] if isinstance(names, str) else names:
        chosen |= _matching(name, known)
    return KeptModules(chosen, dict.fromkeys(chosen, ModuleOutputs(outputs)) if outputs is not None else None)


def kept(modules: Mapping[str, nn.Module], outputs: Mapping[str, ModuleOutputs]) -> KeptModules:
    """Keeps modules that are at hand in float32, each by its name, but not their copies; see `keep_fp32`.

    Raises:
        KeepError: One of them cannot be kept in float32; nothing was changed.
    """
    for name, module in modules.items():
        _check(name, module)
    return KeptModules(modules, outputs, travels=False)


class KeptModules:
    """Modules that are kept in float32; leaving it as a context manager ends that.

    Attributes:
        names: Qualified names of the modules.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        outputs: Mapping[str, ModuleOutputs] | None = None,
        *,
        travels: bool = True,
    ) -> None:
        self.names = tuple(modules)
        self.travels = travels
        self._outputs = {id(modules[name]): each for name, each in (outputs or {}).items()}
        once = {id(module): module for module in modules.values()}
        self._forwards = [_kept_forward(module).keep(self) for module in once.values()]

    def remove(self) -> None:
        """Lets the modules compute as before, unless another handle keeps them. Safe to call twice."""
        while self._forwards:
            self._forwards.pop().let_go(self)

    def outputs_of(self, module: nn.Module) -> ModuleOutputs | None:
        """How what a module returns is given back; None where it stays float32."""
        return self._outputs.get(id(module))

    def __enter__(self) -> KeptModules:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<ampscope.keep_fp32 {', '.join(map(repr, self.names))}{'' if self._forwards else ', removed'}>"


class ModuleOutputs(NamedTuple):
    """How a module in float32 gives back what it gave in half precision, where a half dtype is asked for."""

    dtype: torch.dtype  #: that it had
    where_they_fit: bool = False  #: only values that fit, and only in calls that nothing is trained by

    def given_back(self, result: Any) -> Any:
        """Casts what a call returned in float32 back to the dtype that it had, as far as is asked for."""
        unproved = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return cast(result, self._cast, {torch.float32}) if unproved or not self.where_they_fit else result

    def _cast(self, tensor: Tensor) -> Tensor:
        narrow = tensor.to(self.dtype)
        return narrow if not self.where_they_fit or _fits_all(tensor, narrow) else tensor


class Float32Forward(HeldForward):
    """The ``forward`` of a module that is kept in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.handles: list[KeptModules] = []  #: that keep the module; what is asked for by the latest holds
        self.outputs: ModuleOutputs | None = None
        self._kinds = call_state.device_types()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        return (
            _call(self.plain, args, kwargs, self._kinds, self.outputs) if self.handles else self.plain(*args, **kwargs)
        )

    def keep(self, handle: KeptModules) -> Float32Forward:
        """Adds a handle that keeps the module."""
        self.handles.append(handle)
        self._follow()
        return self

    def let_go(self, handle: KeptModules) -> None:
        """Removes a handle; without any, the module gets its own forward back."""
        self.handles.remove(handle)
        self._follow()
        if not self.handles:
            self.leave()

    def _follow(self) -> None:
        self.outputs = self.handles[-1].outputs_of(self._module) if self.handles else None
        self.travels = any(handle.travels for handle in self.handles)


def _kept_forward(module: nn.Module) -> Float32Forward:
    held = vars(module)
    kept = held.get("forward")
    if not isinstance(kept, Float32Forward):
        kept = held["forward"] = Float32Forward(module)
    return kept


# -- computing in float32 ---------------------------------------------------------------------------------------------


def _call(
    forward: Callable[..., Any], args: Any, kwargs: Any, kinds: tuple[str, ...], outputs: ModuleOutputs | None
) -> Any:
    """Calls ``forward`` in float32; what it returns is narrow again where a half dtype was asked for."""
    is_half = outputs is not None and _asks_for(outputs.dtype, args, kwargs, kinds)
    result = _run(forward, args, kwargs, kinds)
    return outputs.given_back(result) if outputs is not None and is_half else result


def _asks_for(dtype: torch.dtype, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a call is made in an autocast region of a half dtype, or is given tensors in it."""
    for kind in kinds:
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is dtype:
            return True
    return holds((args, kwargs), {dtype})


def _run(forward: Callable[..., Any], args: Any, kwargs: Any, kinds: tuple[str, ...]) -> Any:
    """Calls ``forward`` outside of autocast; recursive and without an exit stack, so that torch.compile follows."""
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _run(forward, args, kwargs, kinds)
    return forward(*cast(args, _widened, _WIDER), **cast(kwargs, _widened, _WIDER))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDER[tensor.dtype])


def _fits_all(tensor: Tensor, narrow: Tensor) -> bool:
    """Whether nothing finite became infinite."""
    return bool((narrow.isfinite() | ~tensor.isfinite()).all())


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
