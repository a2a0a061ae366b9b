"""Lists what keeps a step from being run again: gaps of its tape, and models that would notice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ampscope.capture.tape.call_tape import MAX_ENTRIES
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, EntryKind, OutsideTensor
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.tape.weight_writes import IN_FORWARD
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.sharding import class_name, obstacle_to_replay
from ampscope.capture.tracing.light_statistics import finite

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


def obstacle_of_models(roots: Iterable[nn.Module], modules: Iterable[nn.Module]) -> str:
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


#: What hides calls from the tape, and what to do.
COMPILED = (
    "what runs inside a function that torch.compile compiled is not seen: compile the model alone, model.compile(), "
    "and call it and the loss outside compiled functions"
)

#: Why a step is not run again that an optimizer decided on the device, and whose gradients were finite.
WEIGHTS_HAD_MOVED = "what it left reached the host only after the optimizer had moved the weights"


def why_not(step: TapedStep, models: Models) -> str:
    """Why a step cannot be run again; empty when it can."""
    sharded = obstacle_to_replay(itertools.chain(models.roots, models.modules))
    return _of_tape(step) or sharded or obstacle_of_models(models.roots, models.modules)


def _of_tape(step: TapedStep) -> str:
    """Why a step cannot be replayed at all; empty when it can."""
    if step.moved:
        return WEIGHTS_HAD_MOVED
    if step.tape.obstacle or step.state.gap():
        return step.tape.obstacle or step.state.gap()
    if step.edits_weights():
        return IN_FORWARD
    if step.tape.full:
        return f"the step made more than {MAX_ENTRIES} calls, too many to keep"
    entries = [entry for _, entry in step.entries()]
    if not step.given and not any(entry.kind is EntryKind.BACKWARD for entry in entries):
        return "no backward was seen in the step"
    gaps = (_gap(entry, step.tape.start) for entry in entries)
    return next(filter(None, gaps), "")


def lost_weights(step: TapedStep, models: Models) -> str:
    """Why the weights themselves cannot be told to be the origin, though they are not finite; empty where they can."""
    if step.after_unjudged and not all(finite(weight) for _, weight in models.parameters.values()):
        return "the weights were moved within the step before AMPscope could look, and were not finite afterwards"
    return ""


def _gap(entry: Entry, start: int) -> str:
    """Says what an entry builds on that the tape, which begins at ``start``, does not hold; empty if all is there."""
    for reference in (*entry.earlier, *entry.arguments.outside):
        if isinstance(reference, EarlierResult) and reference.entry < start:
            return "the step builds on calls of a step before, which the tape has let go"
        if isinstance(reference, OutsideTensor) and reference.tensor.grad_fn is not None and not _cuts_history(entry):
            made_by = reference.tensor.grad_fn.name()
            gap = f"the step uses a tensor whose making the tape did not see (its history ends in {made_by})"
            return f"{gap}; {COMPILED}" if dynamo.in_use() else gap
    return ""


def _cuts_history(entry: Entry) -> bool:
    """Whether a call takes the values of its operands only."""
    return not entry.state.ambient.grad or getattr(entry.call, "__name__", "") == "detach"
