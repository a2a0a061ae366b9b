"""Failures and harmless twins of complex, 8-bit, sparse and whole numbers, which are measured like any other."""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.trace.vocabulary import Cause
from tests.integration.causes.failures import Failure, zero_row
from tests.integration.causes.harmless import Harmless
from tests.integration.causes.trained import Loop


def spectrum(h: Tensor) -> Tensor:
    return torch.fft.rfft(h.float())


def as_features(z: Tensor) -> Tensor:
    """Real numbers as many as the head wants, of five complex ones."""
    return torch.view_as_real(z).flatten(-2)[..., :8]


def phases(h: Tensor) -> Tensor:
    return as_features(spectrum(h) / spectrum(h).abs())


def kept_apart(h: Tensor) -> Tensor:
    """Neither part of any divisor is free of zeros, but no divisor is zero."""
    apart = torch.tensor([1.0, 1j, 1.0, 1j, 1.0])
    return as_features(spectrum(h) / apart)


def inverse_filter(h: Tensor) -> Tensor:
    return as_features(1 / spectrum(h))


def cepstrum(h: Tensor) -> Tensor:
    return torch.fft.irfft(torch.log(spectrum(h)))


def magnitude_by_hand(h: Tensor) -> Tensor:
    return torch.view_as_real(spectrum(h)).square().sum(-1).sqrt().repeat(1, 2)[:, :8]


def compressed(h: Tensor) -> Tensor:
    return spectrum(h).abs().pow(0.3).repeat(1, 2)[:, :8]


def magnitude(h: Tensor) -> Tensor:
    z = spectrum(h)
    return (z.abs() + z.angle()).repeat(1, 2)[:, :8]


def half_parts(h: Tensor) -> Tensor:
    return as_features(spectrum(h)).half()


def mean_of_the_kept(h: Tensor) -> Tensor:
    """Divides by a count, a whole number that is zero in a row of nothing."""
    return h.float() / (h != 0).sum(-1, keepdim=True)


def mean_of_at_least_one(h: Tensor) -> Tensor:
    return h.float() / (h != 0).sum(-1, keepdim=True).clamp_min(1)


def adjacency(h: Tensor) -> Tensor:
    """Neighbours weighted by the logarithm of their distance, as a sparse matrix."""
    near = torch.log(h.float().abs()).to_sparse()
    return torch.sparse.mm(near, h.float().t()).repeat(1, 2)


def neighbours(h: Tensor) -> Tensor:
    near = h.float().relu().to_sparse()
    return torch.sparse.mm(near, h.float().t()).repeat(1, 2)


def gates(h: Tensor) -> Tensor:
    """One row after another, each taken apart as recurrent cells do it: by views that do not say they are."""
    rows = torch.log(h.float().abs()).flip(0).unbind(0)
    return torch.stack([torch.cat(torch.ops.aten.unsafe_chunk(row, 2)) for row in rows])


def beyond_eight_bits(h: Tensor) -> Tensor:
    return h.float() + (h.detach().float() * 5e3).to(torch.float8_e5m2).float() / 5e3


def into_eight_bits(h: Tensor) -> Tensor:
    return h.to(torch.float8_e4m3fn).float() + h.float()


MEASURED = [
    Failure("silence", Loop(part=phases, odd=zero_row), Cause.DIV_ZERO, "aten.div.Tensor"),
    Failure("inverse filter", Loop(part=inverse_filter, odd=zero_row), Cause.DIV_ZERO, "aten.reciprocal.default"),
    Failure("gates", Loop(part=gates, odd=zero_row), Cause.LOG_ZERO, "aten.log.default"),
    Failure(
        "eight bits",
        Loop(part=beyond_eight_bits, odd=lambda x: 100 * x),
        Cause.FP16_OVERFLOW,
        "aten._to_copy.default",
        says="float8_e5m2, which ends at 57,344",
    ),
    Failure("cepstrum", Loop(part=cepstrum, odd=zero_row), Cause.LOG_ZERO, "aten.log.default"),
    Failure(
        "magnitude by hand",
        Loop(part=magnitude_by_hand, odd=zero_row),
        Cause.SQRT_GRAD_ZERO,
        "aten.div.Tensor",
        phase="backward",
    ),
    Failure(
        "compressed magnitude",
        Loop(part=compressed, odd=zero_row),
        Cause.POW_GRAD_ZERO,
        "aten.pow.Tensor_Scalar",
        phase="backward",
    ),
    Failure(
        "parts in half",
        Loop(part=half_parts, odd=lambda x: x.abs() * 60_000 / x.abs().max()),
        Cause.FP16_OVERFLOW,
        "aten._to_copy.default",
    ),
    Failure("empty row", Loop(part=mean_of_the_kept, odd=zero_row), Cause.DIV_ZERO, "aten.div.Tensor"),
    Failure("sparse", Loop(part=adjacency, odd=zero_row), Cause.LOG_ZERO, "aten.log.default"),
]

MEASURED_HARMLESS = [
    Harmless("silence and its magnitude", Loop(part=magnitude, odd=zero_row)),
    Harmless("zeros in one part", Loop(part=kept_apart, odd=zero_row)),
    Harmless("loud parts in float32", Loop(part=lambda h: as_features(spectrum(h)) / 1e5, odd=lambda x: x * 8000)),
    Harmless("empty row over one", Loop(part=mean_of_at_least_one, odd=zero_row)),
    Harmless("sparse zeros", Loop(part=neighbours, odd=zero_row)),
    Harmless("eight bits", Loop(part=into_eight_bits)),
]
