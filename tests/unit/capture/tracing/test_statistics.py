"""Statistics of tensors against numpy, element by element."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.tracing import full_statistics, light_statistics
from ampscope.capture.tracing.exponent_histogram import SAMPLE
from ampscope.capture.tracing.full_statistics import Census
from ampscope.capture.tracing.light_statistics import Slots, stored
from ampscope.trace.schema import UNMEASURED, Statistics

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


def _mixed(dtype: torch.dtype, count: int = 1000) -> Tensor:
    """Random signs, magnitudes over the whole range of the dtype, its subnormals and zeros of both signs included."""
    limits = torch.finfo(dtype)
    lowest = math.log2(limits.smallest_normal) - 6
    exponents = torch.empty(count, dtype=torch.float64).uniform_(lowest, math.log2(limits.max))
    values = torch.exp2(exponents) * (torch.randint(0, 2, (count,)) * 2 - 1)
    values[::17] = 0.0
    values[5::34] = -0.0
    return values.to(dtype)


def _as_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy().ravel()


def _expected(tensor: Tensor) -> Statistics:
    """The definition in the trace's schema, in plain numpy and Python."""
    values = _as_numpy(tensor)
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite)
    positive = magnitudes[magnitudes > 0]
    bins = Counter(math.frexp(value)[1] - 1 for value in positive)
    lowest = min(bins, default=None)
    return Statistics(
        min=float(values.min()),
        max=float(values.max()),
        nan=int(np.isnan(values).sum()),
        posinf=int(np.isposinf(values).sum()),
        neginf=int(np.isneginf(values).sum()),
        zeros=int((magnitudes == 0).sum()),
        subnormals=int((positive < torch.finfo(tensor.dtype).smallest_normal).sum()),
        max_finite=float(magnitudes.max()) if magnitudes.size else None,
        min_positive=float(positive.min()) if positive.size else None,
        exp_low=lowest,
        exp_counts=tuple(bins[e] for e in range(lowest, max(bins) + 1)) if lowest is not None else None,
    )


def _full(tensor: Tensor) -> Statistics:
    every = Census()
    every.measure(tensor)
    (measured,) = every.read()
    return measured


def _same(ours: Statistics, theirs: Statistics) -> bool:
    return all(a == b or repr(a) == repr(b) == "nan" for a, b in zip(ours, theirs, strict=True))


@every_dtype
def test_every_statistic_agrees_with_numpy(dtype: torch.dtype) -> None:
    tensor = _mixed(dtype)
    assert _same(_full(tensor), _expected(tensor))


@every_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_single_non_finite_element_is_seen_and_the_rest_still_measured(dtype: torch.dtype, value: float) -> None:
    tensor = _mixed(dtype)
    tensor[123] = value
    measured = _full(tensor)
    assert _same(measured, _expected(tensor))
    assert measured.finite is False
    assert sum((measured.nan or 0, measured.posinf or 0, measured.neginf or 0)) == 1


@every_dtype
def test_a_tensor_without_a_finite_element(dtype: torch.dtype) -> None:
    measured = _full(torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype))
    assert (measured.nan, measured.posinf, measured.neginf) == (1, 1, 1)
    assert measured.max_finite is None
    assert measured.min_positive is None
    assert measured.exp_counts is None
    assert (measured.zeros, measured.subnormals) == (0, 0)


@every_dtype
def test_the_smallest_numbers_of_a_dtype_are_subnormal_and_not_zero(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    smallest = math.ldexp(limits.smallest_normal, -1)
    measured = _full(torch.tensor([smallest, -smallest, limits.smallest_normal, 0.0], dtype=dtype))
    assert (measured.zeros, measured.subnormals) == (1, 2)
    assert measured.min_positive == smallest
    assert measured.exp_low == round(math.log2(smallest))
    assert measured.exp_counts == (2, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(2.5), id="0-dim"),
        pytest.param(torch.arange(24.0).view(4, 6).t(), id="transposed"),
        pytest.param(torch.arange(24.0)[1::3], id="strided"),
        pytest.param(torch.tensor([1.5]).expand(4, 4), id="expanded"),
        pytest.param(torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[:, 1], id="permuted part"),
        pytest.param(torch.arange(8.0).flip(0), id="flipped"),
        pytest.param(torch.ones(3, 4, requires_grad=True), id="requires grad"),
        pytest.param(torch.ones(3, 4, requires_grad=True) * 2, id="with a history"),
        pytest.param(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels last"),
    ],
)
def test_shape_and_layout_do_not_matter(tensor: Tensor) -> None:
    assert _same(_full(tensor), _expected(tensor.detach()))
    slots = Slots()
    slots.measure(tensor)
    (measured,) = slots.read()
    assert (measured.min, measured.max) == (_expected(tensor.detach()).min, _expected(tensor.detach()).max)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.empty(0, 3), id="empty"),
        pytest.param(torch.ones(2, device="meta"), id="meta"),
        pytest.param(torch.eye(2).to_mkldnn(), id="opaque"),
    ],
)
def test_what_has_no_measurable_values_is_left_alone(tensor: Tensor) -> None:
    assert not light_statistics.measurable(stored(tensor))


WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32]


@pytest.mark.parametrize("dtype", [*WHOLE, torch.uint64], ids=str)
def test_whole_numbers_are_measured(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    measured = _full(tensor)
    assert (measured.min, measured.max, measured.zeros, measured.finite) == (0.0, 1.0, 2, True)
    assert _light(tensor)[:2] == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_eight_bit_floats_are_measured_with_subnormals_of_their_own(dtype: torch.dtype) -> None:
    subnormal = torch.finfo(dtype).smallest_normal / 2
    tensor = torch.tensor([-3.0, 0.0, 2.0, subnormal]).to(dtype)
    measured = _full(tensor)
    assert (measured.min, measured.max, measured.zeros, measured.finite) == (-3.0, 2.0, 1, True)
    assert measured.min_positive == subnormal
    spoilt = torch.tensor([1.0, math.nan]).to(dtype)
    assert (_full(spoilt).nan, _full(spoilt).max_finite) == (1, 1.0)
    assert not light_statistics.finite(spoilt)
    assert math.isnan(_light(spoilt).max or 0.0)


def _light(tensor: Tensor) -> Statistics:
    slots = Slots()
    slots.measure(stored(tensor))
    (measured,) = slots.read()
    return measured


class TestComplex:
    """Extremes are of the real and imaginary parts together; elements are counted whole."""

    VALUES = (1 - 2j, 0j, -0.25j, 3 + 0j)

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    @pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
    def test_both_parts_are_looked_at(self, dtype: torch.dtype) -> None:
        measured = _full(torch.tensor(self.VALUES).to(dtype))
        assert (measured.min, measured.max, measured.max_finite, measured.min_positive) == (-2.0, 3.0, 3.0, 0.25)
        assert (measured.zeros, measured.finite) == (1, True)

    def test_a_conjugate_is_measured_as_it_reads(self) -> None:
        measured = _full(torch.tensor(self.VALUES).conj())
        assert (measured.min, measured.max) == (0.0, 3.0)

    def test_elements_that_are_not_finite_are_counted_once(self) -> None:
        inf, nan = math.inf, math.nan
        tensor = torch.tensor([complex(nan, 1), complex(nan, inf), complex(inf, 1), complex(0, -inf), 2 + 1j])
        measured = _full(tensor)
        assert (measured.nan, measured.posinf, measured.neginf, measured.max_finite) == (2, 1, 1, 2.0)
        assert not light_statistics.finite(tensor)
        assert math.isnan(_light(tensor).min or 0.0)

    def test_zeros_are_counted_exactly_in_a_large_tensor(self) -> None:
        tensor = torch.ones(8 * SAMPLE, dtype=torch.complex64)
        tensor[1::4] = 0
        assert _full(tensor).zeros == 2 * SAMPLE


STORED: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("make", STORED.values(), ids=STORED)
@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage).*")
def test_the_values_of_a_sparse_or_nested_tensor_are_looked_at(make: Callable[[], Tensor]) -> None:
    tensor = make()
    values = stored(tensor)
    assert _light(tensor).max == 1.0
    assert light_statistics.finite(tensor)
    values[0] = math.inf
    assert not light_statistics.finite(tensor)


def test_a_finite_number_that_float32_does_not_hold_stays_finite_in_a_trace() -> None:
    tensor = torch.tensor([-1e200, 1e300], dtype=torch.float64)
    kept = light_statistics.recorded(_full(tensor))
    assert (kept.min, kept.max, kept.max_finite) == (
        -light_statistics.LARGEST,
        light_statistics.LARGEST,
        light_statistics.LARGEST,
    )
    assert light_statistics.recorded(_full(tensor.fill_(math.inf))).max == math.inf


class TestSample:
    """Tensors above `SAMPLE` elements: extremes and non-finite counts stay exact, the histogram is an estimate."""

    COUNT = 4 * SAMPLE + 3

    def test_extremes_and_non_finite_counts_are_exact(self) -> None:
        tensor = torch.randn(self.COUNT)
        tensor[1], tensor[2] = 1e9, -1e9  # between the sampled elements
        measured = _full(tensor)
        assert (measured.min, measured.max, measured.max_finite) == (-1e9, 1e9, 1e9)
        tensor[3] = math.nan
        measured = _full(tensor)
        assert (measured.nan, measured.finite, measured.max_finite) == (1, False, 1e9)

    @every_dtype
    def test_what_is_counted_in_parts_adds_up(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(full_statistics, "_CHUNK", 100)
        tensor = _mixed(dtype, 1050)
        tensor[3::100], tensor[150:350], tensor[999], tensor[5] = math.nan, math.inf, -math.inf, -math.inf
        for same in (tensor, tensor.view(50, 21).t()):
            assert _full(same)[:8] == pytest.approx(_expected(tensor)[:8], nan_ok=True, rel=0, abs=0)

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_the_histogram_is_scaled_up_to_the_whole(self, layout: str) -> None:
        tensor = torch.full((self.COUNT, 2), 3.0)
        measured = _full(tensor if layout == "contiguous" else tensor.t())
        assert measured.exp_low == 1
        assert measured.exp_counts == (2 * self.COUNT,)

    def test_every_column_of_a_wide_matrix_is_looked_at(self) -> None:
        """A power of two as the step would read the same few columns of every row."""
        tensor = torch.ones(1024, 64)
        tensor[:, 13] = 0.0
        assert _full(tensor).zeros == pytest.approx(1024, rel=0.2)


class TestCensus:
    """Many tensors, measured one after another and read once."""

    def test_many_tensors_of_several_dtypes_keep_their_order(self) -> None:
        tensors = [_mixed(DTYPES[i % 4], 1 + i % 300) for i in range(2500)]  # more than one round of histograms
        every = Census()
        assert [every.measure(tensor) for tensor in tensors] == list(range(len(tensors)))
        assert all(_same(ours, _expected(tensor)) for ours, tensor in zip(every.read(), tensors, strict=True))

    def test_large_samples_are_counted_before_they_fill_the_memory(self) -> None:
        every = Census()
        for exponent in range(300):
            every.measure(torch.full((SAMPLE,), 2.0 ** (exponent % 100)))
        measured = every.read()
        assert [one.exp_low for one in measured] == [exponent % 100 for exponent in range(300)]
        assert {one.exp_counts for one in measured} == {(SAMPLE,)}

    def test_reading_twice_gives_the_same(self) -> None:
        every = Census()
        every.measure(torch.ones(3))
        assert every.read() == every.read()

    def test_a_later_write_into_the_tensor_does_not_change_what_was_measured(self) -> None:
        every, tensor = Census(), torch.ones(3)
        every.measure(tensor)
        tensor.fill_(7.0)
        assert every.read()[0].exp_low == 0

    def test_memory_begun_in_inference_mode_serves_outside_of_it(self) -> None:
        every, light = Census(), Slots()
        with torch.inference_mode():
            every.measure(torch.ones(3))
            light.measure(torch.ones(3))
        every.measure(torch.ones(3))
        light.measure(torch.ones(3))
        assert len(every.read()) == len(light.read()) == 2


class TestSlots:
    """Min and max of many tensors, read at once, in the order in which they were measured."""

    def test_many_tensors_of_several_dtypes(self) -> None:
        tensors = [_mixed(DTYPES[i % 4], 50) for i in range(1300)]  # more than two banks
        slots = Slots()
        assert [slots.measure(tensor) for tensor in tensors] == list(range(len(tensors)))
        for measured, tensor in zip(slots.read(), tensors, strict=True):
            assert (measured.min, measured.max) == (float(tensor.min()), float(tensor.max()))
            assert measured.finite
            assert measured.nan is None, "a light pass does not count"

    @every_dtype
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    def test_non_finite_values_come_through(self, dtype: torch.dtype, value: float) -> None:
        tensor = _mixed(dtype)
        tensor[-1] = value
        slots = Slots()
        slots.measure(tensor)
        (measured,) = slots.read()
        assert measured.finite is False
        assert math.isnan(measured.min or 0.0) == math.isnan(value)

    def test_a_later_write_into_the_tensor_does_not_change_what_was_measured(self) -> None:
        slots, tensor = Slots(), torch.ones(3)
        slots.measure(tensor)
        tensor.fill_(7.0)
        assert slots.read()[0].max == 1.0

    def test_reading_twice_gives_the_same(self) -> None:
        slots = Slots()
        slots.measure(torch.ones(3))
        assert slots.read() == slots.read()

    def test_a_gradient_that_has_a_history_itself(self) -> None:
        """``backward(create_graph=True)`` makes such gradients."""
        slots = Slots()
        slots.measure(torch.ones(3, requires_grad=True) * 2)
        assert slots.read()[0].max == 2.0


@every_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_one_element_that_is_not_finite_is_enough(dtype: torch.dtype, value: float) -> None:
    tensor = _mixed(dtype)
    assert light_statistics.finite(tensor)
    tensor[-1] = value
    assert not light_statistics.finite(tensor)
    assert not light_statistics.finite(tensor.view(50, 20).t().requires_grad_())


@pytest.mark.parametrize(
    ("tensor", "verdict"),
    [
        pytest.param(torch.empty(0, 3), True, id="empty"),
        pytest.param(torch.arange(3), True, id="integers"),
        pytest.param(torch.eye(2).to_sparse(), True, id="sparse"),
        pytest.param((torch.eye(2) * math.inf).to_sparse(), False, id="sparse with NaN"),
        pytest.param(torch.eye(2).to(torch.float8_e5m2), True, id="float8"),
        pytest.param(torch.full((2,), math.inf).to(torch.float8_e5m2), False, id="float8 with infinity"),
    ],
)
def test_finite_or_not_whatever_the_layout(tensor: Tensor, verdict: bool) -> None:
    assert light_statistics.finite(tensor) is verdict


def test_finite_is_unknown_where_nothing_was_measured() -> None:
    assert UNMEASURED.finite is None


class _Minima(TorchDispatchMode):
    """Notes whether what a minimum is asked of lies as torch can read it, or has to be copied first."""

    def __init__(self) -> None:
        super().__init__()
        self.as_they_lie: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "aminmax" in str(func):
            self.as_they_lie.append(args[0].is_contiguous())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("tensor", "as_it_lies"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), True),
        (torch.randn(4, 5).t(), True),
        (torch.randn(4, 1, 5).permute(2, 0, 1), True),
        (torch.randn(4, 10)[:, ::2], False),
        (torch.randn(4, 1).expand(4, 3), False),
    ],
    ids=["channels last", "channels last 3d", "transposed", "permuted", "strided", "expanded"],
)
def test_what_is_dense_is_measured_where_it_lies(tensor: Tensor, as_it_lies: bool) -> None:
    slots = light_statistics.Slots()
    with _Minima() as minima:
        low, high = light_statistics.extremes(tensor)
        slots.measure(tensor)
    assert (low, high) == (tensor.min(), tensor.max())
    assert (slots.read()[0].min, slots.read()[0].max) == (low.item(), high.item())
    assert minima.as_they_lie == [as_it_lies, as_it_lies]
