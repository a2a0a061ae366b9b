"""What lies below a magnitude, of values that are known one by one."""

from __future__ import annotations

import numpy as np
import pytest

from ampscope.analysis.exponents import Exponents
from ampscope.analysis.rounding import FORMATS
from ampscope.trace.dtypes import FINFO


def exponents_of(*tensors: np.ndarray, dtype: str = "float32", with_top: bool = False) -> Exponents:
    sizes = [np.abs(each[each != 0]).astype(np.float64) for each in tensors]
    powers = [np.frexp(each)[1] - 1 for each in sizes]
    counts = [np.bincount(each - each.min()) for each in powers]
    return Exponents(
        row=np.repeat(np.arange(len(sizes)), [len(each) for each in counts]),
        exponent=np.concatenate(
            [np.arange(each.min(), each.min() + len(count)) for each, count in zip(powers, counts, strict=True)]
        ),
        count=np.concatenate(counts).astype(np.float64),
        low=np.array([each.min() for each in sizes]),
        high=np.array([each.max() for each in sizes]),
        mantissa=np.full(len(sizes), FINFO[dtype].mantissa_bits),
        lowest=np.full(len(sizes), FINFO[dtype].lowest),
        top=np.array([_padded(np.sort(each)[::-1][:16]) if with_top else np.full(16, np.nan) for each in sizes]),
        falls=np.full((len(sizes), 64), np.nan),
    )


def _padded(largest: np.ndarray) -> np.ndarray:
    return np.append(largest, np.full(16 - largest.size, np.nan))


@pytest.mark.parametrize("size", [4, 16])
def test_of_few_values_nothing_is_estimated(size: int) -> None:
    values = np.abs(SPREAD[:size])
    tensors = exponents_of(values, with_top=True)
    for limit in (1e-36, float(np.median(values)), 1e30):
        counts, masses = tensors.below(np.array([limit]))
        assert counts[0] == (values < limit).sum()
        if size < 16 or limit > values.min():
            assert masses[0] == pytest.approx(values[values < limit].sum())
    assert tensors.mass[0] == pytest.approx(values.sum())


@pytest.mark.parametrize("place", [0, 3, 15])
def test_beside_the_largest_it_is_exact(place: int) -> None:
    largest = np.sort(SPREAD)[::-1]
    tensors = exponents_of(SPREAD, with_top=True)
    for inclusive, above in ((False, largest[: place + 1]), (True, largest[:place])):
        if above.size == 16:
            continue  # all that are known lie above: there may be more
        counts, masses = tensors.below(np.array([largest[place]]), inclusive=inclusive)
        assert counts[0] == SPREAD.size - above.size
        assert tensors.mass[0] - masses[0] == pytest.approx(above.sum())


NORMAL = np.random.default_rng(0).normal(size=4096)
SPREAD = np.exp(4 * np.random.default_rng(1).normal(size=4096))


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.3, 1.0, 1.7, 2.9, 100.0])
def test_values_and_mass_below_a_limit(limit: float) -> None:
    tensors = exponents_of(NORMAL, SPREAD)
    counts, masses = tensors.below(np.array([limit, limit]))
    for number, values in enumerate((np.abs(NORMAL), SPREAD)):
        assert counts[number] / 4096 == pytest.approx((values < limit).mean(), abs=0.01)
        part = values[values < limit].sum() / values.sum()
        assert masses[number] / tensors.mass[number] == pytest.approx(part, abs=0.03)
    assert tensors.values.tolist() == [4096, 4096]
    assert tensors.mass == pytest.approx([np.abs(NORMAL).sum(), SPREAD.sum()], rel=0.03)


def test_on_a_coarse_grid_a_limit_takes_whole_values() -> None:
    values = np.repeat([1.0, 2.0, 3.0, 4.0], 25) * 2.0**-24  # the smallest numbers of float16
    tensors = exponents_of(values, dtype="float16")
    for limit, inclusive, share in (
        (2.0, False, 25),
        (2.0, True, 50),
        (1.5, True, 25),
        (3.0, True, 75),
        (0.7, True, 0),
    ):
        counts, _ = tensors.below(np.array([limit * 2.0**-24]), inclusive=inclusive)
        assert counts[0] == pytest.approx(share, abs=1.0)  # by the logarithm, which is no even spread


def test_one_value_is_itself() -> None:
    tensors = exponents_of(np.full(7, 0.3))
    assert tensors.below(np.array([0.29]))[0][0] == pytest.approx(0, abs=0.01)
    assert tensors.below(np.array([0.31]))[0][0] == pytest.approx(7)
    assert tensors.mass[0] == pytest.approx(2.1, rel=0.01)


def test_nothing_is_nothing() -> None:
    whole, real = np.empty(0, np.int64), np.empty(0)
    empty = Exponents(whole, whole, real, real, real, whole, whole, real.reshape(0, 16), real.reshape(0, 64))
    assert (empty.rows, empty.values.size, empty.below(np.empty(0))[0].size) == (0, 0, 0)


def test_the_ends_of_float16_are_numpys() -> None:
    half = FORMATS["float16"]
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(half.overflow))
        assert np.float16(np.nextafter(half.overflow, 0)) == half.largest
    assert np.float16(half.flushed) == 0
    assert np.float16(np.nextafter(half.flushed, 1)) > 0
    assert np.float16(half.subnormal) == 2.0**half.normal
    assert np.float16(np.nextafter(half.subnormal, 0)) < 2.0**half.normal


@pytest.mark.parametrize(
    ("name", "overflow", "flushed"),
    [
        ("float8_e4m3fn", 464.0, 2.0**-10),
        ("float8_e5m2", 61440.0, 2.0**-17),
        ("bfloat16", (2 - 2.0**-8) * 2.0**127, 2.0**-134),
    ],
)
def test_the_ends_of_the_others_are_their_standards(name: str, overflow: float, flushed: float) -> None:
    assert (FORMATS[name].overflow, FORMATS[name].flushed) == (overflow, flushed)
