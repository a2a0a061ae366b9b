"""The name of a torch function tells what it does with its arguments, and which dtype a call of it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree

#: Functions that change what backward does with their tensor, and return nothing of use.
_ATTACHES = frozenset({"register_hook", "retain_grad"})

#: Functions whose name ends as if they wrote, and that leave every value as it is.
_LEAVES_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad", "register_hook"})

#: What is known of a tensor without its values: attributes, and methods that some of torch's functions are called as.
_FACTS = ("device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse")
_MORE_FACTS = ("itemsize", "layout", "names", "nbytes", "ndim", "output_nr", "requires_grad", "shape", "_version")
_QUESTIONS = ("__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_pinned")
_MORE_QUESTIONS = ("is_floating_point", "is_signed", "nelement", "numel", "size", "storage_offset", "stride")


def _asking() -> Iterator[Any]:
    for name in (*_FACTS, *_MORE_FACTS):
        attribute: Any = getattr(Tensor, name, None)
        if hasattr(attribute, "__get__"):
            yield attribute.__get__
    for name in (*_QUESTIONS, *_MORE_QUESTIONS):
        yield from (found for home in (Tensor, torch) if (found := getattr(home, name, None)) is not None)
    yield torch.is_grad_enabled
    yield torch._C._set_grad_enabled


_ASKING = frozenset(_asking())
_GRADIENT: Any = Tensor.grad  # a descriptor, typed as its value
_ASSIGNS_GRADIENT = _GRADIENT.__set__

#: Functions that take a tensor for its shape, dtype or device alone.
_TAKES_SHAPE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")

_RANDOM = ("rand", "dropout", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "gumbel", "rrelu")


#: Functions that give Python the numbers in a tensor, for it to decide by.
_TO_PYTHON = frozenset({"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__contains__"})
_AS_NUMBER = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__"})


def operators() -> list[str]:
    """Every op that torch knows in this process, as ``aten.mm.default``; none where this torch does not tell."""
    told: list[str] = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    names = [name.replace("::", ".") for name in told]
    return [name if name.count(".") > 1 else f"{name}.default" for name in names]


def leaves_all_as_it_is(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a torch function neither makes, reads nor writes values: it asks for a shape, or forgets a gradient.

    Frameworks ask some hundred times a step; this is told from one look-up.
    """
    return func in _ASKING or (func == _ASSIGNS_GRADIENT and len(args) > 1 and args[1] is None)


class FunctionFacts(NamedTuple):
    """A torch function, as far as its name tells what it does; ``out=`` makes any of them write."""

    name: str
    asks: bool  #: for a shape, a dtype, a device: it neither makes, reads nor writes values
    assigns_gradient: bool
    in_place: bool  #: it overwrites its first argument
    writes: bool  #: numbers, that is, or other memory
    draws: bool  #: random numbers
    gives_to_python: bool  #: the numbers in a tensor
    is_of_gradient: bool  #: it reads or assigns the attribute ``grad``


#: Of what has no name, such as a module that is called.
UNNAMED = FunctionFacts("", *[False] * 7)
#: Of functions that were called; ask `facts_of` for another.
known_facts: dict[Any, FunctionFacts] = {}
_MOST_FACTS = 4096


def facts_of(func: Callable[..., Any]) -> FunctionFacts:
    """Works out the facts of a torch function from its name; `known_facts` has them from then on."""
    name = getattr(func, "__name__", "")
    facts = FunctionFacts(
        name=name,
        asks=func in _ASKING,
        assigns_gradient=func == _ASSIGNS_GRADIENT,
        in_place=_is_named_in_place(name),
        writes=writes_values(func, {}),
        draws=draws_random_numbers(name),
        gives_to_python=gives_to_python(func),
        is_of_gradient=getattr(func, "__self__", None) is _GRADIENT,
    )
    # what belongs to an object, or closes over others, would keep them alive
    if not isinstance(func, (MethodType, partial)) and getattr(func, "__closure__", None) is None:
        if len(known_facts) >= _MOST_FACTS:
            known_facts.clear()
        known_facts[func] = facts
    return facts


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function overwrites its first argument (or ``out=``), judged by torch's naming convention."""
    return kwargs.get("out") is not None or _is_named_in_place(getattr(func, "__name__", ""))


def targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call in place writes: ``out=``, or its first argument where that is left out or None."""
    out = kwargs.get("out")
    return list(tensor_tree.tensors(out if out is not None else args[0] if args else None))


@cache
def _is_named_in_place(name: str) -> bool:
    if name in _ATTACHES:
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_")


def writes_values(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes numbers into its first argument (or ``out=``), or gives it other memory."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func, "__self__", None) is torch.Tensor.data
    return name not in _LEAVES_VALUES and is_in_place(func, kwargs)


def attaches(func: Callable[..., Any]) -> bool:
    """Whether a function attaches a hook to its tensor."""
    return getattr(func, "__name__", "") in _ATTACHES


def draws_random_numbers(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return any(word in name for word in _RANDOM)


def gives_to_python(func: Callable[..., Any]) -> bool:
    """Whether a torch function hands numbers of a tensor over to Python."""
    name = getattr(func, "__name__", "")
    return name in _TO_PYTHON or name in _AS_NUMBER


def reads_values(func: Callable[..., Any]) -> bool:
    """Whether what a torch function returns depends on the numbers in the tensors that it is given."""
    name = getattr(func, "__name__", "")
    return (
        name not in _TAKES_SHAPE and name not in ("zero_", "fill_") and not name.endswith(("rand_like", "randn_like"))
    )


#: Methods named after the dtype they give.
METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


def dtypes_asked(func: Callable[..., Any], args: Any, kwargs: Any) -> set[torch.dtype]:
    """The dtypes that a call names."""
    asked = {value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)}
    return asked | {METHODS[func]} if func in METHODS else asked
