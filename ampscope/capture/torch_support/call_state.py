"""The state around a call decides its numbers: autocast, grad mode, default device, kernels, random generators.

The functions that read and write the choice of kernels are private names of torch's: one that a version lacks is left
out.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.guard import Suppressed


@cache
def device_types() -> tuple[str, ...]:
    """Device types whose autocast state matters here: ``cpu`` and the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", accelerator.type) if accelerator is not None else ("cpu",)


class AutocastState(NamedTuple):
    """Autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class Ambient(NamedTuple):
    """Autocast, grad mode and default device at a call."""

    regions: tuple[AutocastState, ...]
    cache: bool
    grad: bool
    device: torch.device | None = None  #: on which tensors are made; None where the loop has chosen none

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the enabled autocast region, the accelerator's first; None outside."""
        for region in reversed(self.regions):
            if region.enabled:
                return region.dtype
        return None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body under this state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device is not None:
                stack.enter_context(self.device)
            for region in self.regions:
                if region.enabled != torch.is_autocast_enabled(region.device_type) or region.enabled:
                    stack.enter_context(
                        torch.autocast(region.device_type, region.dtype, region.enabled, cache_enabled=self.cache)
                    )
            yield


@contextlib.contextmanager
def one_autocast_cache() -> Iterator[None]:
    """Lets the regions entered in the body share their cast weights, as regions inside one outer region do."""
    with torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Keeps weights that are cast in the body, perhaps without a history, from being taken for those of the step."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


#: States that were met, by what torch tells of each: it is asked at every function of a loop's own code.
_met: dict[tuple[Any, ...], Ambient] = {}
_MOST_MET = 256


def ambient_now(types: tuple[str, ...]) -> Ambient:
    """The state now."""
    return ambient_with(types, torch.is_grad_enabled())


def ambient_with(types: tuple[str, ...], grad: bool, switched_off: Sequence[str] = ()) -> Ambient:
    """The state now, but for grad mode; autocast counts as on where it is off for AMPscope's own work alone."""
    device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)  # see `default_device`
    told: list[Any] = [types, torch.is_autocast_cache_enabled(), grad, device]
    for kind in types:
        told.append(kind in switched_off or torch.is_autocast_enabled(kind))
        told.append(torch.get_autocast_dtype(kind))
    key = tuple(told)
    known = _met.get(key)
    if known is None:
        regions = tuple(map(AutocastState, types, told[4::2], told[5::2]))
        known = Ambient(regions, told[1], grad, device)
        if len(_met) >= _MOST_MET:
            _met.clear()
        _met[key] = known
    return known


#: Values of the settings, in the order of `_KERNEL_SETTINGS`.
KernelChoice = tuple[Any, ...]


class _Setting(NamedTuple):
    """A setting of the process."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


#: Names of a setting, of what reads it and of what writes it, both below ``torch._C``.
_NAMED = (
    ("sdpa_flash", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("sdpa_flash_3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("sdpa_mem_efficient", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("sdpa_math", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("sdpa_cudnn", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("sdpa_overrideable", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("sdpa_priority", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("sdpa_math_reduces_in_half", "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("cudnn", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cudnn_benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("cudnn_deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("mkldnn_deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    (
        "fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    (
        "bf16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    ("fp16_accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    (
        "cpu_fp16_reduced_precision_reduction",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
)
#: Where torch keeps the precision of float32 products (TF32 among them); what is not said for one is said for all.
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
#: Functions outside of modules that have several kernels, among which a context may choose.
CHOOSES_KERNELS = frozenset(
    ("scaled_dot_product_attention", "multi_head_attention_forward", "linear", "bilinear", "matmul", "__matmul__")
) | frozenset(("mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "backward", "grad"))


def _settings_found() -> Iterator[_Setting]:
    for name, get, put in _NAMED:
        if hasattr(torch._C, get) and hasattr(torch._C, put):
            yield _Setting(name, getattr(torch._C, get), partial(_spread, getattr(torch._C, put)))
    if hasattr(torch._C, "_set_deterministic_algorithms"):
        yield _Setting("deterministic_algorithms", _deterministic, _set_deterministic)
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for place in filter(_is_known, _PRECISIONS):
            name = "fp32_precision_" + "_".join(place)
            put_precision = partial(torch._C._set_fp32_precision_setter, *place)
            yield _Setting(name, partial(torch._C._get_fp32_precision_getter, *place), put_precision)


def _is_known(place: tuple[str, str]) -> bool:
    """Whether this torch keeps a precision there; the pairs that it takes have changed from version to version."""
    with Suppressed() as suppressed:
        torch._C._get_fp32_precision_getter(*place)
    return suppressed.error is None


def _spread(put: Callable[..., None], value: Any) -> None:
    """Writes what may consist of two: whether sums may be rounded, and whether they may be split."""
    put(*value) if isinstance(value, tuple) else put(value)


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


_KERNEL_SETTINGS = tuple(_settings_found())
_READERS = tuple(setting.get for setting in _KERNEL_SETTINGS)


def kernels_now() -> KernelChoice:
    """The settings now: process-wide, reads no device."""
    return tuple(map(operator.call, _READERS))


def kernels_by_name(choice: KernelChoice) -> dict[str, Any]:
    """The settings for people to read."""
    return {setting.name: value for setting, value in zip(_KERNEL_SETTINGS, choice, strict=True)}


@contextlib.contextmanager
def kernels_chosen(choice: KernelChoice | None) -> Iterator[None]:
    """Sets for the body what is otherwise now, and nothing else: a precision may be said for one kind of op or for all.

    Args:
        choice: The settings; None leaves them as they are.
    """
    undo: list[tuple[_Setting, Any]] = []
    try:
        for setting, wanted in zip(_KERNEL_SETTINGS, choice or (), strict=False):
            now = setting.get()
            if now != wanted:
                undo.append((setting, now))
                setting.put(wanted)
        yield
    finally:
        for setting, before in reversed(undo):
            setting.put(before)


class RandomState(NamedTuple):
    """States of every generator a call may draw from."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]  #: of accelerators
    python: Any
    numpy: Any

    @staticmethod
    def take(devices: Iterable[torch.device] = (), *, host: bool = True) -> RandomState:
        """The states now; reads host memory only.

        Args:
            devices: Where the call may compute, besides the current device of the accelerator.
            host: Also those of Python's and NumPy's global generators, which cost more than torch's.
        """
        numpy, found = sys.modules.get("numpy") if host else None, _with_generators(devices)
        return RandomState(
            torch.get_rng_state(),
            dict(zip(found, map(_state, found), strict=True)),
            random.getstate() if host else None,
            numpy.random.get_state() if numpy is not None else None,
        )

    def put_back(self) -> None:
        """Sets every generator to this state.

        One that stands there is not touched: a write makes cuDNN draw the dropout of its recurrent layers anew.
        """
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            if not torch.equal(_state(device), state):
                _generators(device).set_rng_state(state, *_named(device))
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def host_unchanged(self) -> bool:
        """Whether Python's and NumPy's generators still are as they were."""
        now = RandomState.take()
        same = self.python == now.python
        if self.numpy is None or now.numpy is None:
            return same and self.numpy is now.numpy
        return same and self.numpy[2:] == now.numpy[2:] and bool((self.numpy[1] == now.numpy[1]).all())


@contextlib.contextmanager
def random_state_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Puts every generator back to where it was before the body.

    Args:
        devices: Where the body may compute, besides the current device of the accelerator.
    """
    state = RandomState.take(devices)
    try:
        yield
    finally:
        state.put_back()


#: Device types whose numbers come from the host's generator, or from none.
_HOST = frozenset({"cpu", "meta"})


@cache
def _accelerators() -> tuple[torch.device, ...]:
    """One device, without an index, for each type of accelerator that this process may use."""
    return tuple(torch.device(kind) for kind in dict.fromkeys(("cuda", *device_types()[1:])))


def _with_generators(devices: Iterable[torch.device]) -> set[torch.device]:
    """Returns the devices in use that have generators: from ``devices``, the default one, and the current one."""
    default = torch_private.default_device()
    all_devices = (*_accelerators(), *devices, *(() if default is None else (default,)))
    found = set()
    for device in all_devices:
        if device.type not in _HOST and _draws(device):
            found.add(_indexed(device))
    return found


def _generators(device: torch.device) -> Any:
    """The module of torch's that has the generators of a type of device; None where torch has none."""
    return getattr(torch, device.type, None)


def _draws(device: torch.device) -> bool:
    """Whether a type of device is in use, and has generators whose states can be read and written."""
    home = _generators(device)
    return getattr(home, "is_initialized", _always)() and hasattr(home, "get_rng_state")


def _always() -> bool:
    return True


def _indexed(device: torch.device) -> torch.device:
    """The current device of its type, where none is named."""
    index: int | None = device.index
    if index is None and _named(device):
        index = _generators(device).current_device()
    return device if index is None else torch.device(device.type, index)


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """Returns the arguments that name a device to its generator's functions; none where its type has but one (mps)."""
    return (device,) if hasattr(_generators(device), "current_device") else ()


def _state(device: torch.device) -> Tensor:
    state: Tensor = _generators(device).get_rng_state(*_named(device))
    return state
