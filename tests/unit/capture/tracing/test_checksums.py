"""Checksums: every bit counts, however a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampscope.capture.tracing.light_statistics import checksum, read_checksums

ODD = torch.linspace(-3.0, 3.0, 77)


def number(tensor: Tensor) -> int | None:
    return read_checksums([checksum(tensor)])[0]


LAID_OUT = {
    "words": ODD[:64].clone(),
    "a rest": ODD.clone(),
    "begins within a word": ODD[1:],
    "half precision": ODD.half()[3:],
    "8 bits": ODD.to(torch.float8_e5m2),
    "transposed": ODD.view(7, 11).t(),
    "a dimension of one": ODD.clone().as_strided((1, 8), (1, 1)),
    "gaps": ODD.view(7, 11)[:, ::2],
    "expanded": ODD[:1].expand(5),
    "complex": torch.complex(ODD, ODD),
    "conjugated": torch.complex(ODD, ODD).conj(),
    "truth": ODD > 0,
    "integers": torch.arange(77),
    "one number": torch.tensor(2.0),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_bit_of_the_last_element_counts(name: str) -> None:
    tensor = LAID_OUT[name]
    assert number(tensor) is not None
    assert number(tensor) == number(tensor.detach())
    packed = tensor.resolve_conj().contiguous().clone().view(-1)
    other = packed.clone()
    other.view(torch.uint8)[-1] ^= 1
    assert number(other) != number(packed)


def test_the_last_bit_counts() -> None:
    flipped = ODD.clone()
    flipped.view(torch.int32)[40] ^= 1
    assert number(flipped) != number(ODD)


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta")])
def test_where_there_are_no_values_there_is_no_sum(tensor: Tensor) -> None:
    assert number(tensor) is None


def test_a_few_elements_in_the_middle_of_a_word_have_a_sum() -> None:
    history = torch.arange(9).half()
    assert number(history[6:7]) == number(history[6:7].clone())
