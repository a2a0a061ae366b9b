"""Reads an optimizer for capture; alone in knowing ``param_groups`` and the hooks around ``step``."""

from __future__ import annotations

import functools
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite, isnan
from operator import itemgetter
from types import CodeType, FrameType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampscope.capture.torch_support import guard, tensor_tree

#: What an optimizer does all at once, and a copy is told not to: each parameter by itself is what can be read.
_AT_ONCE = {"foreach": False, "fused": False}
#: What every optimizer of torch's has; all else is its subclass's own.
_COMMON = frozenset(
    ("defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")
) | {"_opt_called", "_patch_track_step_called"}
#: How deep what an optimizer keeps by itself is looked into, and the elements that are copied, of all of its tensors.
_OWN_DEPTH, _OWN_ELEMENTS = 4, 1 << 24
#: Groups whose learning rates are told.
_MOST_GROUPS = 64
_SEQUENCES = (list, tuple, set)

_parameters = itemgetter("params")


class OptimizerView(NamedTuple):
    """An optimizer as capture sees it; made where it is needed, nothing is kept of it.

    Whatever a scaler is told to step is one, though it may have no groups, no state and no hooks.
    """

    optimizer: Optimizer

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return getattr(self.optimizer, "param_groups", ())

    @property
    def state(self) -> Mapping[Any, Any]:
        """Gives the optimizer's state, by parameter."""
        state = getattr(self.optimizer, "state", None)
        return state if isinstance(state, Mapping) else {}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters it steps, in the order of its groups."""
        return list(chain.from_iterable(map(_parameters, getattr(self.optimizer, "param_groups", ()))))

    @property
    def with_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters that have gradients now, with those."""
        given: Mapping[int, Tensor] = getattr(self.optimizer, "given", {})
        pairs = ((parameter, given.get(id(parameter), parameter.grad)) for parameter in self.parameters)
        return ((parameter, gradient) for parameter, gradient in pairs if gradient is not None)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are there now."""
        if hasattr(self.optimizer, "given"):
            return [gradient for _, gradient in self.with_gradients]
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    @property
    def learning_rate(self) -> Tensor | float | None:
        """The learning rate of its first group, on the device where the optimizer keeps it; None where it has none."""
        groups = getattr(self.optimizer, "param_groups", ())
        return _number(groups[0].get("lr")) if groups else None

    @property
    def learning_rates(self) -> dict[str, Tensor | float | None]:
        """The groups' learning rates by number and name; empty where they are plain numbers that are all the same."""
        groups = self.groups[:_MOST_GROUPS]
        if len(groups) < 2:
            return {}
        rates = [group.get("lr") for group in groups]
        first = rates[0]
        if not isinstance(first, Tensor) and all(not isinstance(rate, Tensor) and rate == first for rate in rates):
            return {}
        return {_group_name(number, groups[number]): _number(rate) for number, rate in enumerate(rates)}

    @property
    def at_rest(self) -> frozenset[int]:
        """The parameters, by ``id``, whose learning rate is zero now."""
        groups = (group for group in self.groups if not group.get("lr", 1.0))
        return frozenset(id(parameter) for group in groups for parameter in group["params"])

    @property
    def spoilt_numbers(self) -> list[tuple[str, float, list[Tensor]]]:
        """The numbers of its groups that make every weight non-finite, each with its key and the group's parameters.

        That is any NaN, and a learning rate that is infinite; other settings may be infinite to be without effect.
        """
        return [
            (key, value, group["params"])
            for group in getattr(self.optimizer, "param_groups", ())
            for key, value in group.items()
            if type(value) is float and not isfinite(value) and (key == "lr" or isnan(value))
        ]

    @property
    def epsilons(self) -> Iterator[tuple[float, torch.dtype]]:
        """The eps of each group that has one, with the dtype of the group's first parameter."""
        for group in getattr(self.optimizer, "param_groups", ()):
            eps = group.get("eps")
            if isinstance(eps, (int, float)) and group["params"]:
                yield eps, group["params"][0].dtype

    def adjust(self, setting: str, other: Callable[[Any], Any]) -> list[Any]:
        """Changes a setting in each group that has it; returns the values that they had, in order."""
        had = [(group, group[setting]) for group in self.groups if setting in group]
        for group, value in had:
            group[setting] = other(value)
        return [value for _, value in had]

    @property
    def steps_made(self) -> int | None:
        """How many steps its state says it has made (0: it does not count them); None for one without a state."""
        if not self.state:
            return None
        state = next(iter(self.state.values()))
        return int(state.get("step", 0)) if isinstance(state, dict) else None

    @property
    def is_plain(self) -> bool:
        """Whether a copy of it need share nothing with it that a step could write.

        Besides what torch gives it, it holds numbers, tensors (not too large) and Python's own containers of such.
        """
        if not is_optimizer(self.optimizer):
            return False
        own = [value for name, value in vars(self.optimizer).items() if not _is_common(name)]
        few = sum(tensor.numel() for tensor in tensor_tree.tensors(own)) <= _OWN_ELEMENTS
        kept = (value for state in self.state.values() for value in dict(state).values())
        own += [value for value in kept if not isinstance(value, Tensor)]
        return few and all(_consists_of_values(value, _OWN_DEPTH) for value in own)

    @property
    def has_own_step(self) -> bool:
        """Whether its ``step`` is somebody's own, and none of torch's."""
        step = getattr(type(self.optimizer), "step", None)
        return not str(getattr(step, "__module__", "")).startswith("torch.optim")

    def copied_onto(self, copies: Mapping[int, Tensor], prepared: Callable[[Tensor], Tensor]) -> Any:
        """An optimizer like it, for copies of some of its parameters, which steps one parameter after the other.

        Args:
            copies: The copies, by ``id`` of the parameter.
            prepared: Makes a copy of a tensor of its state.

        Returns:
            Where this `is_plain`, a step of it writes the copies and its own state alone.
        """
        again: Any = object.__new__(type(self.optimizer))
        copy = _OwnCopies(copies, prepared)
        for name, value in vars(self.optimizer).items():
            if name != "step":
                common = type(value)() if name.endswith("_hooks") else value
                again.__dict__[name] = common if _is_common(name) else copy.of(value)
        again.state, again.param_groups = defaultdict(dict), []
        for group in self.groups:
            chosen = [parameter for parameter in group["params"] if id(parameter) in copies]
            for parameter in chosen:
                kept = self.state.get(parameter, {})
                again.state[copies[id(parameter)]] = {key: copy.of(value) for key, value in kept.items()}
            if chosen:
                plain = {key: value for key, value in _AT_ONCE.items() if key in group}
                again.param_groups.append({**group, **plain, "params": [copies[id(p)] for p in chosen]})
        return again


def _number(rate: Any) -> Tensor | float | None:
    return rate if isinstance(rate, (Tensor, float, int)) else None


def _group_name(number: int, group: dict[str, Any]) -> str:
    name = group.get("name")
    return f"{number} {name}" if isinstance(name, str) and name else str(number)


class _OwnCopies:
    """Copies what an optimizer keeps beside its state, each tensor once.

    Args:
        copies: Those that parameters have already, by ``id`` of the parameter.
        prepared: Makes a copy of any other tensor.
    """

    def __init__(self, copies: Mapping[int, Tensor], prepared: Callable[[Tensor], Tensor]) -> None:
        self._made = dict(copies)
        self._by_id = {key: id(copied) for key, copied in copies.items()}
        self._prepared = prepared

    def of(self, value: Any) -> Any:
        """The copy of a value that consists of values; what is kept by a parameter or its ``id`` is by the copy's."""
        if isinstance(value, Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = self._prepared(value)
            return self._made[id(value)]
        if isinstance(value, dict):
            items = {self._key(key): self.of(item) for key, item in value.items()}
            return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        return type(value)(map(self.of, value)) if type(value) in _SEQUENCES else value

    def _key(self, key: Any) -> Any:
        return self._by_id.get(key, key) if type(key) is int else self.of(key)


def _consists_of_values(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return type(value) in (Tensor, nn.Parameter) and value.grad_fn is None
    if type(value) in (dict, defaultdict) and depth:
        return all(_consists_of_values(each, depth - 1) for pair in value.items() for each in pair)
    if type(value) in _SEQUENCES and depth:
        return all(_consists_of_values(each, depth - 1) for each in value)
    return isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device))


def _is_common(name: str) -> bool:
    return name in _COMMON or name.endswith("_hooks")


def stand_in(parameters: Iterable[Tensor], given: Mapping[int, Tensor] = MappingProxyType({})) -> Optimizer:
    """Makes a substitute for the optimizer of ``parameters``, until it steps or where there is none.

    Args:
        parameters: What it steps.
        given: Gradients that are not where a backward leaves them, by ``id`` of the parameter.
    """
    return cast(Optimizer, SimpleNamespace(param_groups=[{"params": list(parameters)}], state={}, given=given))


def steps_any(weights: Iterable[Tensor]) -> bool:
    """Whether any optimizer of this process holds one of ``weights``; takes some tens of milliseconds."""
    wanted = set(map(id, weights))
    everything = gc.get_objects()
    optimizers = [each for each in everything if issubclass(type(each), Optimizer)]
    return any(wanted & set(map(id, OptimizerView(each).parameters)) for each in optimizers)


def is_optimizer(thing: object) -> bool:
    """Whether ``thing`` is an optimizer of torch's, or derived from it."""
    return isinstance(thing, Optimizer)


def tells_of_steps(thing: object) -> bool:
    """Whether hooks hear of the steps of ``thing``; a class that never ran the constructor of torch's has none."""
    return isinstance(thing, Optimizer) and getattr(getattr(type(thing), "step", None), "hooked", False) is True


class StepListener(Protocol):
    """Who is told of the steps of optimizers."""

    def before_optimizer(self, optimizer: Optimizer, *, with_closure: bool) -> None:
        """An optimizer is about to step; ``with_closure`` when it was given forward and backward to run by itself."""

    def closure(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Runs the closure that an optimizer was given."""

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""


#: The frame in which torch calls the hooks of a step, and then the step itself; learned when it first calls.
_STEP_FRAMES: dict[int, CodeType] = {}  # by ``id``: a code object's own hash reads all of it


def around_every_step(listener: StepListener) -> tuple[Any, Any]:
    """Has ``listener`` told of every step of every optimizer of the process.

    Returns:
        Two handles, each with a ``remove``.
    """

    def on_begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code has no frame to see, and keeps the closure that it was given
            if _breaks_its_graph(optimizer):
                listener.before_optimizer(optimizer, with_closure=False)
            return None
        code = sys._getframe(2).f_code  # past the door
        _STEP_FRAMES[id(code)] = code
        given = _closure(args, kwargs)
        listener.before_optimizer(optimizer, with_closure=given is not None)
        if given is None:
            return None

        def run(call: Callable[..., Any], values: Any, named: Any) -> Any:
            return listener.closure(optimizer, functools.partial(call, *values, **named))

        @functools.wraps(given)
        def closure(*values: Any, **named: Any) -> Any:
            return guard.through(run, given, values, named)

        return tuple(closure if value is given else value for value in args), {
            name: closure if value is given else value for name, value in kwargs.items()
        }

    def on_end(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() or _breaks_its_graph(optimizer):
            listener.after_optimizer(optimizer)

    begins, ends = functools.partial(guard.tell, on_begin), functools.partial(guard.tell, on_end)
    return register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)


def _breaks_its_graph(optimizer: Optimizer) -> bool:
    """Whether a compiled ``step`` leaves compiled code by itself before it computes: torch's own do, for their no_grad.

    Hooks may be called there; in any other step they would split what the user compiles as one.
    """
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The closure among the arguments of a ``step``, its first one by torch's convention; None without."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def steps_running() -> int:
    """How many optimizers are in the middle of a ``step``, one inside the other, in the code that runs now."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += id(frame.f_code) in _STEP_FRAMES
        frame = frame.f_back
    return count
