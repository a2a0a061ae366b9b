"""The plants: what is put where, in which dtypes it does harm, and what the right diagnosis says of it.

A new plant is one more row of `PLANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.integration.planted_faults import faults
from tests.integration.planted_faults.models import TOKENS, WIDTH, Architecture, Batch

FP16, BF16 = torch.float16, torch.bfloat16
LARGE = 2.0**15  #: half precision holds it, but not a sum of several
IGNORED = -100  #: the label that a cross entropy leaves out

Model = Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a diagnosis has to say."""

    cause: Cause
    op: str
    module: str
    phase: str = "forward"
    replay: str = ReplayStatus.EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A fault in one step of a training."""

    name: str
    answer: Callable[[Architecture], Answer]
    also: Callable[[Architecture], list[Answer]] = lambda _: []  #: where the same step goes wrong independently
    dtypes: tuple[torch.dtype, ...] = (FP16, BF16)
    fits: Callable[[Architecture], bool] = lambda _: True
    insert: Callable[[nn.Module], nn.Module] | None = None  #: takes the second layer's norm's place
    armed: Callable[[Model, Architecture], AbstractContextManager[None]] = lambda *_: nullcontext()
    spoil: Callable[[Batch], Batch] = lambda batch: batch  #: what the bad step trains on
    loss: Callable[[Any, Batch, bool], Tensor] = lambda outputs, *_: outputs.loss  #: told whether the step is bad
    upset: Callable[[Any, Model, Architecture], object] = lambda *_: None  #: what is done to the loop before that step
    every: int | None = None  #: as in `ampscope.watch`

    def __str__(self) -> str:
        return self.name


@contextmanager
def _edited(tensor: Tensor, edit: Callable[[Tensor], object]) -> Iterator[None]:
    """Writes into a weight or a buffer, and puts the old values back afterwards."""
    before = tensor.detach().clone()
    with torch.no_grad():
        edit(tensor)
    yield
    with torch.no_grad():
        tensor.copy_(before)


def _weights_of_large_size(model: Model, where: Architecture) -> AbstractContextManager[None]:
    return _edited(model.get_submodule(where.up).weight, lambda weight: weight.copy_(weight.sign() * LARGE))


def _loud_norm(model: Model, where: Architecture) -> AbstractContextManager[None]:
    return _edited(model.get_submodule(where.norm).weight, lambda weight: weight.fill_(LARGE * LARGE))


def _nan_in_weight(model: Model, where: Architecture) -> AbstractContextManager[None]:
    return _edited(model.get_submodule(where.up).weight, lambda weight: weight[0, 0].fill_(torch.nan))


def zero_in_weight(model: Model, where: Architecture) -> AbstractContextManager[None]:
    """What the NaN in a weight is compared with."""
    return _edited(model.get_submodule(where.up).weight, lambda weight: weight[0, 0].fill_(0.0))


def _nan_in_buffer(model: Model, where: Architecture) -> AbstractContextManager[None]:
    return _edited(model.get_submodule(where.norm).offset, lambda offset: offset.fill_(torch.nan))


@contextmanager
def _another_buffer(model: Model, where: Architecture) -> Iterator[None]:
    """The module gets another tensor for its buffer, as code does that computes a new mean; then its own again."""
    norm = model.get_submodule(where.norm)
    before, norm.offset = norm.offset, torch.full_like(norm.offset, torch.nan)
    yield
    norm.offset = before


@contextmanager
def _fault(model: Model, where: Architecture) -> Iterator[None]:
    norm = model.get_submodule(where.norm)
    norm.armed = True
    yield
    norm.armed = False


def _nan_row(batch: Batch) -> Batch:
    """Puts NaNs into one row of the pictures; text comes as embeddings, one row of which is NaN."""
    batch = dict(batch)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].clone()
        batch["pixel_values"][1, :, 0] = torch.nan
        return batch
    embedded = torch.randn(*batch.pop("input_ids").shape, WIDTH)
    embedded[1, 0] = torch.nan
    return {"inputs_embeds": embedded, **batch}


def without_nan_row(batch: Batch) -> Batch:
    """The rest of a batch that has one."""
    rest = [row for row in range(len(batch["labels"])) if row != 1]
    return {name: values[rest] for name, values in _nan_row(batch).items()}


def _row_without_attention(batch: Batch) -> Batch:
    """An additive mask, made by the user, under which the first sample's first token sees nothing."""
    mask = torch.zeros(len(batch["input_ids"]), 1, TOKENS, TOKENS)
    mask[0, 0, 0] = -torch.inf
    return {**batch, "attention_mask": mask}


def row_with_itself(batch: Batch) -> Batch:
    """The same, where that token sees itself."""
    batch = _row_without_attention(batch)
    batch["attention_mask"][0, 0, 0, 0] = 0.0
    return batch


def _negative_log_probability(outputs: Any, batch: Batch, bad: bool) -> Tensor:
    """A cross entropy by hand; in the bad step the model is so sure of itself that wrong labels are impossible."""
    logits = outputs.logits.float() * (1e4 if bad else 1.0)
    probabilities = logits.softmax(-1)
    others = batch["labels"].roll(1, -1)  # a model whose embeddings are tied begins by being sure of its input
    wanted = nn.functional.one_hot(others, probabilities.shape[-1]).bool()
    return -probabilities[wanted].log().mean()


PLANTS = (
    Plant(
        name="overflow in a matmul of the MLP",
        dtypes=(FP16,),
        armed=_weights_of_large_size,
        answer=lambda where: Answer(Cause.FP16_OVERFLOW, where.product, where.up),
    ),
    Plant(
        name="overflow in a cast before the MLP",
        dtypes=(FP16,),
        armed=_loud_norm,
        answer=lambda where: Answer(Cause.FP16_OVERFLOW, "aten._to_copy.default", where.up),
        also=lambda where: [Answer(Cause.FP16_OVERFLOW, "aten._to_copy.default", name) for name in where.beside],
    ),
    Plant(
        name="overflow in a square",
        dtypes=(FP16,),
        insert=faults.Square,
        armed=_fault,
        answer=lambda where: Answer(Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar", where.norm),
    ),
    Plant(
        name="overflow in a square that is made zero",
        dtypes=(FP16,),
        insert=faults.GuardedSquare,
        armed=_fault,
        answer=lambda where: Answer(Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar", where.norm),
    ),
    Plant(
        name="zero row under a norm without eps",
        insert=faults.RootOfZero,
        armed=_fault,
        answer=lambda where: Answer(Cause.DIV_ZERO, "aten.rsqrt.default", where.norm),
    ),
    Plant(
        name="zero row under a root, in backward",
        insert=faults.RootGradientAtZero,
        armed=_fault,
        answer=lambda where: Answer(Cause.SQRT_GRAD_ZERO, "aten.div.Tensor", where.norm, "backward"),
    ),
    Plant(
        name="zero row over an eps that half precision loses",
        dtypes=(FP16,),
        insert=faults.LostEpsilon,
        armed=_fault,
        answer=lambda where: Answer(Cause.EPS_UNDERFLOW, "aten.div.Tensor", where.norm),
    ),
    Plant(
        name="-1e9 in a mask",
        dtypes=(FP16,),
        insert=faults.LiteralMask,
        armed=_fault,
        answer=lambda where: Answer(Cause.LITERAL_OVERFLOW, "aten.mul.Tensor", where.norm),
    ),
    Plant(
        name="row without attention",
        fits=lambda where: bool(where.attention),
        spoil=_row_without_attention,
        answer=lambda where: Answer(Cause.ALL_MASKED_SOFTMAX, "aten._softmax.default", where.attention),
    ),
    Plant(
        name="NaN row in the batch",
        spoil=_nan_row,
        answer=lambda where: Answer(Cause.BAD_INPUT, "input", where.entry),
    ),
    Plant(
        name="no label counts",
        spoil=lambda batch: {**batch, "labels": torch.full_like(batch["labels"], IGNORED)},
        answer=lambda _: Answer(Cause.DIV_ZERO, "aten.nll_loss_forward.default", ""),
    ),
    Plant(
        name="log of a zero probability",
        loss=_negative_log_probability,
        answer=lambda _: Answer(Cause.LOG_ZERO, "aten.log.default", ""),
    ),
    Plant(
        name="poisoned buffer",
        insert=faults.Shift,
        armed=_nan_in_buffer,
        answer=lambda where: Answer(Cause.BAD_BUFFER, "buffer", where.norm),
    ),
    Plant(
        name="NaN weight",
        armed=_nan_in_weight,
        answer=lambda where: Answer(Cause.BAD_WEIGHT, "parameter", where.up),
    ),
    Plant(
        name="bit flip in an activation",
        insert=faults.BitFlip,
        armed=_fault,
        every=1,
        answer=lambda where: Answer(
            Cause.HARDWARE_TRANSIENT, where.normalises, f"{where.norm}.norm", replay=ReplayStatus.NOT_REPRODUCED
        ),
    ),
    Plant(
        name="silence under a phase transform",
        insert=faults.PhaseTransform,
        armed=_fault,
        answer=lambda where: Answer(Cause.DIV_ZERO, "aten.div.Tensor", where.norm),
    ),
    Plant(
        name="overflow in the parts of a spectrum",
        dtypes=(FP16,),
        insert=faults.LoudSpectrum,
        armed=_fault,
        answer=lambda where: Answer(Cause.FP16_OVERFLOW, "aten._to_copy.default", where.norm),
    ),
    Plant(
        name="small squares that half precision loses",
        dtypes=(FP16,),
        insert=faults.LostSquares,
        armed=_fault,
        answer=lambda where: Answer(Cause.FP16_UNDERFLOW, "aten.div.Tensor", where.norm),
    ),
    Plant(
        name="log of a probability that half precision loses",
        dtypes=(FP16,),
        insert=faults.LostProbability,
        armed=_fault,
        answer=lambda where: Answer(Cause.LOG_ZERO, "aten.log.default", where.norm),
    ),
    Plant(
        name="buffer replaced by a poisoned one",
        insert=faults.Shift,
        armed=_another_buffer,
        answer=lambda where: Answer(Cause.BAD_BUFFER, "buffer", where.norm),
    ),
)
