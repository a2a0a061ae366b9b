"""The watched models: their modules and parameters by name, and which of their calls are the outermost."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import dynamo

#: Attributes under which wrappers keep the module that does the work.
_INNER = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
)


def _inner_name(module: nn.Module) -> str | None:
    for home, name, attribute in _INNER:
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and isinstance(module, kind):
            return attribute
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that computes: without ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` around."""
    name = _inner_name(module)
    return unwrapped(getattr(module, name)) if name else module


def is_optimized(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of another one."""
    return _inner_name(module) == "_orig_mod"


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to this very module."""
    return is_optimized(module) or getattr(module, "_compiled_call_impl", None) is not None


class Models:
    """One or several watched models.

    Args:
        roots: The models as the user holds them; wrapped ones are named as if they were not.
    """

    def __init__(self, roots: list[nn.Module]) -> None:
        self.roots = roots
        self.names: dict[int, str] = {}  #: ``id`` of a module -> qualified name
        self.types: dict[str, str] = {}
        self.modules: list[nn.Module] = []
        self.parameters: dict[int, tuple[str, nn.Parameter]] = {}  #: ``id`` -> name, parameter
        self._plain: dict[int, list[str]] = {}
        self._trainable: dict[int, list[nn.Parameter]] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Looks at the models again: layers and parameters may have been replaced. Returns whether any were."""
        lent = any(not isinstance(p, nn.Parameter) for root in self.roots for p in root.parameters())
        if lent and self.names:
            return False  # inside torch.func.functional_call: the weights are someone's for the time of a call
        before = list(self.parameters), list(self.names)
        for table in (self.names, self.types, self.parameters, self._plain, self._trainable):
            table.clear()
        self.modules.clear()
        self.types[""] = ""
        for index, root in enumerate(self.roots):
            prefix = "" if len(self.roots) == 1 else f"{type(root).__name__}[{index}]"
            self._add(root, prefix)
        return before != (list(self.parameters), list(self.names))

    def _add(self, root: nn.Module, prefix: str) -> None:
        wrapper = root
        while wrapper is not unwrapped(wrapper):
            self.names[id(wrapper)] = prefix
            wrapper = getattr(wrapper, _inner_name(wrapper) or "module")
        for name, module in wrapper.named_modules():
            full = ".".join(filter(None, (prefix, without_wrappers(name))))
            if id(module) not in self.names:
                self.names[id(module)] = full
                self.modules.append(module)
            self.types.setdefault(full, type(module).__name__)
            for leaf, parameter in module.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), (".".join(filter(None, (full, leaf))), parameter))

    @property
    def compiled(self) -> bool:
        """Whether any part may run as compiled code."""
        return dynamo.in_use() or any(is_compiled(module) for module in (*self.roots, *self.modules))

    def owns(self, parameters: Iterator[Tensor]) -> bool:
        """Whether any of ``parameters`` belongs to a watched model."""
        return any(id(parameter) in self.parameters for parameter in parameters)

    def module_type(self, name: str) -> str:
        """Class name of the module with a qualified name."""
        return self.types.get(name, "")

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every buffer: its module's name, its own name and itself."""
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield self.names[id(module)], name, buffer

    def mutable_tensors(self) -> Iterator[Tensor]:
        """What a forward may change in place: buffers, frozen parameters, tensors in plain attributes."""
        yielded: set[int] = set()
        for module in self.modules:
            held = vars(module)
            frozen = [p for p in held["_parameters"].values() if p is not None and not p.requires_grad]
            plain = [held[name] for name in self._plain_tensors(module) if isinstance(held.get(name), Tensor)]
            for tensor in (*held["_buffers"].values(), *frozen, *plain):
                if tensor is not None and id(tensor) not in yielded and tensor.is_leaf:
                    yielded.add(id(tensor))
                    yield tensor

    def _plain_tensors(self, module: nn.Module) -> list[str]:
        """Names of the attributes of ``module`` that held a tensor when it was first looked at."""
        known = self._plain.get(id(module))
        if known is None:
            known = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
            self._plain[id(module)] = known
        return known

    def versions(self, module: nn.Module) -> list[int]:
        """The in-place change counters of a module's trainable parameters."""
        own = self._trainable.get(id(module))
        if own is None:
            own = self._trainable[id(module)] = [p for p in module.parameters() if p.requires_grad]
        return [parameter._version for parameter in own]

    def weight_norms(self) -> list[Tensor]:
        """The L2 norm of every dense trainable parameter, as device scalars."""
        weights = [p.detach() for _, p in self.parameters.values() if p.requires_grad and p.layout is torch.strided]
        return list(torch._foreach_norm(weights)) if weights else []

    def main_type(self) -> str:
        """Class name of the first model."""
        return type(unwrapped(self.roots[0])).__name__

    def main_device(self) -> torch.device:
        """Where the parameters live."""
        return next((parameter.device for _, parameter in self.parameters.values()), torch.device("cpu"))


def without_wrappers(name: str) -> str:
    """``block.0`` for ``block._orig_mod.0``: names as in the model that the user wrote."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
