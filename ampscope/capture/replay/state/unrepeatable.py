"""Models that must not run again by themselves: what they write, count or draw from is out of a replay's reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ampscope.capture.torch_support.communication.sharded_models import class_name

#: Homes of the functions that ``make_graphed_callables`` puts in the place of a forward, torch's and others'.
_GRAPHED = frozenset({"torch.cuda.graphs", "transformer_engine.pytorch.graph"})
#: Wrappers that note each forward and backward for their next step, by home and name.
_COUNTING = frozenset(
    {
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("fairscale.nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        ("fairscale.nn.data_parallel.sharded_ddp", "ShardedDataParallel"),
        ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    }
)


def obstacle(roots: Iterable[nn.Module], modules: Iterable[nn.Module]) -> str:
    """Why no step of these models is run again; empty where none of them speaks against it.

    Args:
        roots: The models as the loop calls them.
        modules: All that they are made of.
    """
    reasons = (reason for root in roots for reason in _of_wrapper(root))
    others = (reason for module in modules for reason in _of_module(module))
    return next(reasons, "") or next(others, "")


def _of_wrapper(root: nn.Module) -> Iterator[str]:
    yield from _of_module(root)
    for kind in type(root).__mro__:
        if (kind.__module__, kind.__name__) in _COUNTING:
            yield f"{kind.__name__} notes each forward and backward for its next step, and would note those of a replay"


def _of_module(module: nn.Module) -> Iterator[str]:
    if any(map(_is_graph, _own(module))):
        yield (
            f"a part of {class_name(module)} was captured into a CUDA graph, which computes on the training's own "
            f"memory, gradients and buffers included"
        )
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        yield (
            "DataParallel runs each part of a batch on another device, with random numbers and statistics of its own, "
            "and a replay runs the batch as a whole; steps of DistributedDataParallel can be replayed"
        )
    if isinstance(module, nn.RNNBase) and _draws_in_cudnn(module):
        yield (
            f"the dropout between the layers of {class_name(module)} is drawn from a state of cuDNN's own, which "
            "nobody can put back; single layers with nn.Dropout between them can be replayed"
        )


def _own(module: nn.Module) -> Iterator[Any]:
    """Yields what a module keeps in its attributes, and in containers there."""
    for value in vars(module).values():
        yield value
        if type(value) in (list, tuple):
            yield from value
        elif type(value) is dict:
            yield from value.values()


def _is_graph(value: Any) -> bool:
    return isinstance(value, torch.cuda.CUDAGraph) or getattr(value, "__module__", None) in _GRAPHED


def _draws_in_cudnn(module: nn.RNNBase) -> bool:
    drops = module.training and module.dropout > 0 and module.num_layers > 1
    on_cuda = drops and any(parameter.is_cuda for parameter in module.parameters(recurse=False))
    return on_cuda and bool(torch.backends.cudnn.enabled)
