"""Describes tensors that outlive a step and are not finite, for an incident's row."""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.capture.step.measures.state.held import Held, Seen
from ampscope.capture.step.measures.state.state_watch import BadState
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import BadTensor
from ampscope.trace.schema import StateKind, Trigger

#: Tensors that are described; a run whose weights are all NaN has thousands.
MOST_NAMED = 16
#: What an incident is called where all that is bad is of one kind.
STATE_TRIGGERS: dict[StateKind, Trigger] = {
    StateKind.WEIGHT: Trigger.NONFINITE_WEIGHT,
    StateKind.BUFFER: Trigger.NONFINITE_BUFFER,
    StateKind.OPTIMIZER: Trigger.NONFINITE_STATE,
    StateKind.CARRIED: Trigger.NONFINITE_STATE,
}


def described(bad: BadState) -> tuple[BadTensor, ...]:
    """Each tensor for the evidence of an incident; waits for the device."""
    return tuple(_one(held, seen) for held, seen in bad.held[:MOST_NAMED])


def _one(held: Held, seen: Seen) -> BadTensor:
    nan, inf = _counts(local(held.tensor).detach())
    return BadTensor(
        kind=held.kind,
        name=held.name,
        owner=held.owner,
        module=held.module,
        dtype=dtype_name(held.tensor.dtype),
        finite_at=seen.finite_at,
        bad_at=seen.bad_at,
        when=seen.when,
        nan=nan,
        inf=inf,
        numel=held.tensor.numel(),
    )


def _counts(tensor: Tensor) -> tuple[int, int]:
    with torch.no_grad():
        return int(tensor.isnan().sum()), int(tensor.isinf().sum())
