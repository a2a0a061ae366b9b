"""What two samples say of the steps to come, of magnitudes known by hand."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch

from ampscope.capture.tracing.headroom import Outlook, SampledRanges
from ampscope.capture.tracing.sites import Signature, SiteKey, Sites
from ampscope.trace.schema import Phase
from tests.support.training.injuries.interrupting import Interrupting

FIRST = 5  #: number of the first site: the run was resumed


def looked(
    *samples: tuple[int, float], dtype: torch.dtype = torch.float16, phase: Phase = Phase.FORWARD, low: float = 0.0
) -> Outlook:
    """What the last of some samples says, each a step and a largest value."""
    sites = Sites(FIRST, str)
    ranges = SampledRanges(sites)
    sites.number(SiteKey("aten.arange.default", phase=Phase.FORWARD, outputs=Signature((torch.int64,), ((1,),))))
    number = sites.number(SiteKey("aten.mm.default", phase=phase, outputs=Signature((dtype,), ((1,),))))
    outlook = Outlook()
    for step, high in samples:
        outlook = ranges.note(step, np.array([FIRST, number]), np.array([0.0, low]), np.array([1e9, high]))
    return outlook


def test_growth_goes_on_to_the_limit_of_the_dtype() -> None:
    left = looked((8, 2.0**8), (12, 2.0**10)).steps_left  # half a doubling a step
    assert left == pytest.approx((math.log2(65504) - 10) / 0.5)
    assert looked((8, 2.0**8), (12, 2.0**10), dtype=torch.bfloat16).steps_left > 200


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([(8, 2.0**10)], id="seen once"),
        pytest.param([(8, 2.0**10), (16, 2.0**9)], id="falling"),
        pytest.param([(8, 65504.0), (16, 65504.0)], id="a constant at the very limit"),
        pytest.param([(8, 0.0), (16, 1.0)], id="was zero"),
        pytest.param([(8, 1.0), (16, math.nan)], id="not measured"),
    ],
)
def test_nothing_else_lasts_for_a_time(samples: list[tuple[int, float]]) -> None:
    assert looked(*samples).steps_left == math.inf


def test_what_moves_near_the_limit_may_not_last() -> None:
    assert looked((8, 60000.0), (16, 50000.0)).steps_left == 0.0
    assert looked((8, 1.0), (16, 1.0), low=-50000.0).steps_left == math.inf
    assert looked((8, 60000.0), (16, 50000.0), phase=Phase.BACKWARD).steps_left == math.inf


def test_what_is_near_either_end_is_close() -> None:
    assert looked((0, 60000.0)).closest == (FIRST + 1,)
    assert looked((0, 2.0**-13)).closest == (FIRST + 1,)
    assert looked((0, 60000.0), phase=Phase.BACKWARD).closest == (FIRST + 1,)
    assert looked((0, 1.0)).closest == ()
    assert looked((0, 60000.0), dtype=torch.float32).closest == ()


def test_a_site_that_did_not_run_is_compared_with_when_it_did() -> None:
    sites = Sites(0, str)
    ranges = SampledRanges(sites)
    for name in ("a", "b"):
        sites.number(SiteKey(name, phase=Phase.FORWARD, outputs=Signature((torch.float16,), ((1,),))))
    for step, site, high in [(0, 0, 16.0), (1, 1, 1.0), (8, 0, 4096.0)]:
        outlook = ranges.note(step, np.array([site]), np.array([0.0]), np.array([high]))
    assert outlook.steps_left == pytest.approx(4.0, rel=1e-3)


def test_a_place_is_followed_whatever_its_shapes_and_however_long() -> None:
    sites = Sites(0, str)
    ranges = SampledRanges(sites)
    for step in range(0, 400, 2):
        shape = (1 + step % 6,)
        gives = Signature((torch.float16,), (shape,))
        number = sites.number(SiteKey("aten.mm.default", phase=Phase.FORWARD, outputs=gives))
        ranges.note(step, np.array([number]), np.array([0.0]), np.array([2.0 ** (step / 40)]))
    (ahead,) = ranges.ahead()
    assert ahead.forecast is not None
    assert abs(ahead.forecast.step - 640) < 32
    assert all(ranges.is_of(site, ahead.place) for site in range(len(sites)))


@pytest.mark.parametrize("op", ["aten._softmax.default", "aten.sigmoid.default", "aten.full.default", "input"])
def test_what_cannot_grow_is_not_followed(op: str) -> None:
    sites = Sites(0, str)
    ranges = SampledRanges(sites)
    sites.number(SiteKey(op, phase=Phase.FORWARD, outputs=Signature((torch.float16,), ((1,),))))
    for step in range(0, 400, 20):
        ranges.note(step, np.array([0]), np.array([0.0]), np.array([2.0 ** (step / 40)]))
    assert ranges.ahead() == []


def test_what_interrupts_it_leaves_no_site_half_described() -> None:
    """A signal may come between any two lines; the next sample is told as if none had come."""

    def interrupted(line: int) -> tuple[list[Outlook], Interrupting]:
        sites = Sites(0, str)
        ranges, interrupting = SampledRanges(sites), Interrupting(line, _preempt, "SampledRanges._describe")
        for name, dtype in (("a", torch.float16), ("b", torch.bfloat16), ("c", torch.float16)):
            sites.number(SiteKey(name, phase=Phase.FORWARD, outputs=Signature((dtype,), ((1,),))))
        site, low = np.arange(3), np.zeros(3)
        with contextlib.suppress(InterruptedError), interrupting:
            ranges.note(0, site, low, np.array([1.0, 2.0, 3.0]))
        samples = (4, np.array([16.0, 8.0, 60000.0])), (8, np.array([64.0, 9.0, 50000.0]))
        return [ranges.note(step, site, low, high) for step, high in samples], interrupting

    expected, run = interrupted(0)
    assert run.lines > 20
    for line in range(1, run.lines):
        outlooks, run = interrupted(line)
        assert run.where is not None
        assert outlooks[1] == expected[1], run.where


def test_no_number_of_a_site_is_given_twice_where_one_was_interrupted() -> None:
    points = [SiteKey(name, phase=Phase.FORWARD, outputs=Signature((torch.float16,), ((1,),))) for name in "ab"]
    line, run = 0, Interrupting(0, _preempt, "Sites.number")
    while run.where is not None or not line:
        line += 1
        sites, run = Sites(FIRST, str), Interrupting(line, _preempt, "Sites.number")
        with contextlib.suppress(InterruptedError), run:
            sites.number(points[0])
        numbers = [sites.number(point) for point in reversed(points)]
        assert [sites.point(number) for number in numbers] == points[::-1], run.where
    assert line > 4


def _preempt() -> None:
    raise InterruptedError
