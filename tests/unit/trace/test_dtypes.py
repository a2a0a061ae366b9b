"""The facts of each floating-point dtype are those that torch and its own numbers give."""

from __future__ import annotations

import math

import pytest
import torch

from ampscope.trace.dtypes import FINFO, HALF_DTYPES


@pytest.mark.parametrize("name", FINFO)
def test_torch_says_the_same(name: str) -> None:
    ours, theirs = FINFO[name], torch.finfo(getattr(torch, name))
    assert (ours.name, 8 * ours.bytes) == (name, theirs.bits)
    assert (ours.max, ours.eps, ours.smallest_normal) == (theirs.max, theirs.eps, theirs.smallest_normal)


@pytest.mark.parametrize("name", FINFO)
def test_the_smallest_number_is_the_last_above_zero(name: str) -> None:
    smallest = torch.tensor(FINFO[name].smallest_subnormal, dtype=torch.float64)
    dtype = getattr(torch, name)
    assert smallest.to(dtype).double() == smallest
    assert (smallest / 2).to(dtype).double() == 0.0
    assert math.log2(FINFO[name].smallest_subnormal) == FINFO[name].lowest


@pytest.mark.parametrize("name", FINFO)
def test_from_the_top_exponent_on_nothing_fits(name: str) -> None:
    assert math.frexp(FINFO[name].max)[1] == FINFO[name].top


def test_the_half_dtypes() -> None:
    assert {"float16", "bfloat16"} == HALF_DTYPES
