"""Comparisons of steps written op by op: what is a root, what follows, and what rounding allows for."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.replay.compare.compare_results import (
    Comparison,
    DifferenceKind,
    Divergence,
    Likeness,
    parted_in_words,
)
from ampscope.analysis.replay.compare.comparison import compare
from ampscope.analysis.replay.compare.sides import chosen
from ampscope.errors import AmpscopeError
from ampscope.report.diagnosis_words import apart_words
from ampscope.trace.schema import Cast, Node
from tests.support.trace_builder import TraceBuilder

LIVE: dict[str, Any] = {"step": 0, "source": "live"}


class Step:
    """Writes a step in which each op reads the one before."""

    def __init__(self, folder: Path, **columns: Any) -> None:
        self.trace = TraceBuilder(folder)
        self.trace.step(traced="live", **columns)
        self.last = self.trace.op(self.trace.site(Node.INPUT, name="args[0]", in_dtypes=()), **LIVE, checksum=1)

    def op(self, name: str = "mm", *, reads: int | None = None, site: dict[str, Any] | None = None, **row: Any) -> int:
        before = self.last if reads is None else reads
        self.last = self.trace.op(self.trace.site(f"aten.{name}.default", **(site or {})), **LIVE, **row)
        self.trace.edge(before, self.last, **LIVE)
        return self.last

    def close(self) -> Path:
        return self.trace.close()


def chain(folder: Path, *peaks: float, name: str = "mm", **site: Any) -> Path:
    """A step of ops in a row with these largest elements."""
    step = Step(folder)
    for peak in peaks:
        step.op(name, site=site, min=-1.0, max=peak, max_finite=None)
    return step.close()


def against(folder: Path, one: tuple[float, ...], other: tuple[float, ...], **site: Any) -> Comparison:
    return compare(chain(folder / "one", *one, **site), chain(folder / "other", *other, **site))


def test_a_few_units_in_the_last_place_are_rounding(tmp_path: Path) -> None:
    found = against(tmp_path, (4.0, 4.0), (4.0 * (1 + 3 * 2**-10), 4.0))
    assert (found.likeness, found.first_divergence) == (Likeness.WITHIN_TOLERANCE, None)


def test_the_same_is_a_difference_in_float32(tmp_path: Path) -> None:
    dtypes = {"in_dtypes": ("float32", "float32"), "out_dtypes": ("float32",)}
    found = against(tmp_path, (4.0, 4.0), (4.0 * (1 + 3 * 2**-10), 4.0), **dtypes)
    assert found.likeness is Likeness.DIFFERENT
    assert found.first_divergence is not None
    assert found.first_divergence.error == pytest.approx(3 * 2**-10, rel=0.01)


def test_what_is_apart_may_be_farther_apart_later(tmp_path: Path) -> None:
    apart = 4.0 * (1 + 2**-8)  # the limit of one op in float16
    assert against(tmp_path / "a", (4.0,) * 9, (4.0,) * 8 + (apart * (1 + 2**-9),)).likeness is Likeness.DIFFERENT
    grown = tuple(4.0 * (1 + n * 2**-9) for n in range(1, 5))
    assert against(tmp_path / "b", (4.0,) * 4, grown).likeness is Likeness.WITHIN_TOLERANCE


@pytest.mark.parametrize("peak", [math.nan, math.inf])
def test_what_is_not_finite_in_one_is_told_with_its_op(tmp_path: Path, peak: float) -> None:
    found = against(tmp_path, (4.0, 4.0, 4.0), (4.0, peak, peak))
    assert found.differences[0].kind is DifferenceKind.NONFINITE
    assert "mm in fc is not finite in B, and finite in A" in found.differences[0].text
    assert found.first_divergence is not None
    assert (found.first_divergence.seq, found.first_divergence.error) == (2, math.inf)
    words = f"4 in A, {'NaN' if math.isnan(peak) else 'inf'} in B"
    assert found.summary.endswith(f"with mm in fc: {words}.")
    assert apart_words(found.first_divergence) == words


def test_a_loss_that_is_not_finite_in_one_is_told_as_it_is(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder, loss in zip(folders, (2.0, math.nan), strict=True):
        trace = TraceBuilder(folder)
        trace.step(loss=loss)
        trace.close()
    found = compare(*folders).first_divergence
    assert found is not None
    assert apart_words(found) == "2 in A, NaN in B"


@pytest.mark.parametrize("peak", [math.nan, math.inf])
def test_the_same_that_is_not_finite_is_the_same(tmp_path: Path, peak: float) -> None:
    assert against(tmp_path, (4.0, peak), (4.0, peak)).identical


def test_what_follows_from_a_root_is_not_told_again(tmp_path: Path) -> None:
    found = against(tmp_path, (4.0,) * 6, (4.0, 6.0, 7.0, 8.0, 9.0, 10.0))
    told = [each for each in found.differences if each.kind is DifferenceKind.VALUE]
    assert [(each.count, each.step) for each in told] == [(1, 0)]
    assert found.first_divergence is not None
    assert found.first_divergence.seq == 2


def test_a_sum_that_cancels_is_measured_by_what_was_added(tmp_path: Path) -> None:
    for folder, peak in (("one", 1e-6), ("other", 3e-6)):
        step = Step(tmp_path / folder)
        step.op("mm", min=-4.0, max=4.0, max_finite=4.0)
        step.op("sum", min=-1e-6, max=peak, max_finite=None)
        step.close()
    assert compare(tmp_path / "one", tmp_path / "other").likeness is Likeness.WITHIN_TOLERANCE


def summed(folder: Path, total: float, *, of: int, name: str, out: int) -> Path:
    """A step in which ``of`` numbers up to 4 come to ``total``, in output ``out`` of an op, which a cast reads."""
    step = Step(folder)
    terms = step.op("mm", min=-4.0, max=4.0, max_finite=None)
    outputs = {"out_shapes": ("8",) * (out + 1), "out_dtypes": ("float16",) * (out + 1)}
    site = step.trace.site(f"aten.{name}.default", in_shapes=(f"{of}x8",), in_dtypes=("float16",), **outputs)
    first = step.trace.op(site, **LIVE, numel=8, max=total if not out else 1.0, min=-1e-4, max_finite=None)
    for number in range(1, out + 1):
        last = total if number == out else 1.0
        step.trace.op(site, **LIVE, seq=first, out=number, numel=8, max=last, min=-1e-4, max_finite=None)
    step.trace.edge(terms, first, **LIVE)
    cast = step.trace.op(step.trace.site("aten._to_copy.default"), **LIVE, max=total, min=-1e-4, max_finite=None)
    step.trace.edge(first, cast, **LIVE, from_out=out)
    return step.close()


@pytest.mark.parametrize(
    ("name", "out", "of"), [("sum", 0, 8), ("sum", 0, 10_000), ("convolution_backward", 2, 8)], ids=str
)
def test_rounding_that_a_sum_leaves_is_none_of_its_readers_differences(
    tmp_path: Path, name: str, out: int, of: int
) -> None:
    noise = 4.0 * 2**-10 * math.sqrt(of)

    def likeness(*totals: float) -> Likeness:
        runs = (tmp_path / f"{total}" for total in totals)
        found = (summed(run, total, of=of, name=name, out=out) for run, total in zip(runs, totals, strict=True))
        return compare(*found).likeness

    assert likeness(noise, noise / 3) is Likeness.WITHIN_TOLERANCE
    assert likeness(4.0 * math.sqrt(of), 3.0 * math.sqrt(of)) is Likeness.DIFFERENT


def test_operands_that_come_from_elsewhere_are_told(tmp_path: Path) -> None:
    for folder, reads in (("one", 0), ("other", 1)):
        step = Step(tmp_path / folder)
        written = step.op("mm"), step.op("relu")
        step.op("exp", reads=written[reads])
        step.close()
    first = compare(tmp_path / "one", tmp_path / "other").differences[0]
    assert (first.kind, first.op) == (DifferenceKind.OPERANDS, "aten.exp.default")
    assert "something else is connected to it" in first.text


def test_noise_between_a_step_and_its_replay_is_no_difference(tmp_path: Path) -> None:
    """A kernel that adds in another order each time: the run itself shows by how much."""
    for folder, live, replay in (("one", 4.0, 4.04), ("other", 4.03, 4.0)):
        trace = TraceBuilder(tmp_path / folder)
        trace.step(traced="live")
        site = trace.site("aten.scatter_add.default")
        trace.op(site, **LIVE, max=live, max_finite=None)
        trace.op(site, step=0, source="replay", max=replay, max_finite=None)
        trace.close()
    assert compare(tmp_path / "one", tmp_path / "other").likeness is Likeness.WITHIN_TOLERANCE
    assert compare(tmp_path / "one", tmp_path / "other", tolerance=1e-3).likeness is Likeness.DIFFERENT


def scaled(folder: Path, scale: float | None, *, first: float = 4.0) -> Path:
    """A loss, which a scaler multiplies where there is one, and what backward makes of it."""
    step = Step(folder, scale=scale)
    step.op("mm", max=first)
    loss = step.op("mean", site={"module": ""}, max=2.0)
    if scale is not None:
        row = {"max": scale, "numel": 1}
        factor = step.trace.op(step.trace.site("aten.full.default", module="", in_dtypes=()), **LIVE, **row)
        step.op("mul", reads=loss, site={"module": "", "in_shapes": ("", "")}, max=2.0 * scale)
        step.trace.edge(factor, step.last, **LIVE)
    step.op("exp", site={"phase": "backward", "module": ""}, max=scale or 1.0)
    return step.close()


def test_a_scaler_that_one_alone_has_is_another_loss_scale(tmp_path: Path) -> None:
    runs = scaled(tmp_path / "one", 1024.0), scaled(tmp_path / "other", None)
    for found, words in (
        (compare(*runs), "1,024 in A and none (as 1) in B"),
        (compare(*runs[::-1]), "none (as 1) in A"),
    ):
        assert found.differences[0].kind is DifferenceKind.SCALE
        assert words in found.differences[0].text
        assert DifferenceKind.OP not in {each.kind for each in found.differences}
        assert found.first_divergence is not None
        assert found.first_divergence.op == "aten.full.default"
        assert found.first_divergence.error == pytest.approx(1 - 1 / 1024)


def test_a_scale_of_1_is_as_none(tmp_path: Path) -> None:
    found = compare(scaled(tmp_path / "one", 1.0), scaled(tmp_path / "other", None))
    assert (found.likeness, found.first_divergence) == (Likeness.WITHIN_TOLERANCE, None)
    assert [each.kind for each in found.differences] == [DifferenceKind.SCALE]


def test_the_first_divergence_has_the_numbers_of_its_own_op(tmp_path: Path) -> None:
    """What led to it may be an earlier op in another dtype, whose own result is within tolerance."""
    for folder, dtype, peak in (("one", "float16", 4.0), ("other", "bfloat16", 8.0)):
        step = Step(tmp_path / folder)
        step.op("mm", site={"in_dtypes": (dtype, dtype), "out_dtypes": (dtype,)}, max=4.0)
        step.op("exp", site={"in_dtypes": ("float32",), "out_dtypes": ("float32",)}, max=peak)
        step.close()
    compared = compare(tmp_path / "one", tmp_path / "other")
    found = compared.first_divergence
    assert found is not None
    assert (found.op, found.seq, found.error) == ("aten.exp.default", 2, 0.5)
    assert compared.summary.startswith(
        "mm ran in float16 in A and in bfloat16 in B, in fc. The numbers part at step 0 "
    )


def test_a_cast_that_one_alone_has_is_where_what_follows_from_it_parts(tmp_path: Path) -> None:
    for folder, peak in (("one", 4.0), ("other", 8.0)):
        step = Step(tmp_path / folder)
        step.op("mm", max=4.0)
        if folder == "other":
            step.op("_to_copy", site={"cast": Cast.EXPLICIT}, max=4.0)
        step.op("exp", max=4.0)
        step.op("log", max=peak)
        step.close()
    found = compare(tmp_path / "one", tmp_path / "other").first_divergence
    assert found is not None
    assert (found.op, found.seq, found.other_seq) == ("aten._to_copy.default", None, 2)


def of_two_optimizers(folder: Path, *, traced: str = "live@1", peak: float = 4.0, **second: Any) -> Path:
    """Two steps of each of two optimizers; ``second`` and ``peak`` are of the second's."""
    trace = TraceBuilder(folder)
    site = trace.site("aten.mm.default")
    for step in range(2):
        trace.step(step=step, traced="live")
        trace.op(site, step=step, source="live", max=4.0)
        trace.step(step=step, optimizer=1, traced=traced, **second)
        if traced:
            trace.op(site, step=step, source=traced, max=peak)
    return trace.close()


def test_the_ops_of_every_optimizer_are_compared(tmp_path: Path) -> None:
    one = of_two_optimizers(tmp_path / "one")
    assert compare(one, of_two_optimizers(tmp_path / "again")).identical
    found = compare(one, of_two_optimizers(tmp_path / "other", peak=8.0))
    assert found.likeness is Likeness.DIFFERENT
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.optimizer) == (0, 1)
    assert found.differences[0].text.startswith("Optimizer 1: mm in fc gives something else")
    assert compare(f"{one}@1", f"{tmp_path / 'other'}@1").likeness is Likeness.DIFFERENT


@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_the_curves_of_every_optimizer_are_compared(tmp_path: Path, column: str) -> None:
    second: dict[str, Any] = {column: 3.0}
    other = of_two_optimizers(tmp_path / "other", **second)
    found = compare(of_two_optimizers(tmp_path / "one"), other)
    assert found.likeness is Likeness.DIFFERENT
    assert found.first_divergence is not None
    assert (found.first_divergence.op, found.first_divergence.optimizer) == ("", 1)
    assert found.differences[0].text.startswith("Optimizer 1: The ")


def test_an_optimizer_without_a_trace_is_told_and_never_identical(tmp_path: Path) -> None:
    runs = of_two_optimizers(tmp_path / "one", traced=""), of_two_optimizers(tmp_path / "other", traced="")
    found = compare(*runs)
    assert (found.identical, found.likeness) == (False, Likeness.WITHIN_TOLERANCE)
    text = "Optimizer 1: No step was traced in both: its ops were not compared."
    assert [each.text for each in found.differences] == [text]


def test_an_optimizer_that_only_one_has_is_a_difference(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "one")
    for step in range(2):
        trace.step(step=step, traced="live")
        trace.op(trace.site("aten.mm.default"), step=step, source="live", max=4.0)
    found = compare(trace.close(), of_two_optimizers(tmp_path / "other"))
    assert not found.identical
    assert "Optimizer 1: A made 0 steps, B 2." in [each.text for each in found.differences]


def test_a_step_before_another_optimizer_comes_first_whatever_its_number(tmp_path: Path) -> None:
    """A discriminator makes several steps for one of the generator's."""
    for folder, peak in (("one", 4.0), ("other", 8.0)):
        trace = TraceBuilder(tmp_path / folder)
        site = trace.site("aten.mm.default")
        order = [(0, 1), (1, 1), (2, 1), (0, 0)]
        for time_, (step, optimizer) in enumerate(order):
            source = "live@1" if optimizer else "live"
            trace.step(step=step, optimizer=optimizer, traced=source, time=100.0 + time_)
            trace.op(site, step=step, source=source, max=peak if time_ >= 2 else 4.0)
        trace.close()
    first = compare(tmp_path / "one", tmp_path / "other").first_divergence
    assert first is not None
    assert (first.step, first.optimizer) == (2, 1)


def test_runs_without_a_step_in_common_are_refused(tmp_path: Path) -> None:
    one, other = TraceBuilder(tmp_path / "one").close(), TraceBuilder(tmp_path / "other").close()
    with pytest.raises(AmpscopeError, match="no step in common"):
        compare(one, other)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("runs/a", ("runs/a", None, None)),
        ("runs/a@3", ("runs/a", 3, None)),
        ("runs/a@3:1", ("runs/a", 3, 1)),
        ("runs/a@:1", ("runs/a", None, 1)),
        ("me@home/a@12", ("me@home/a", 12, None)),
        ("me@home/a", ("me@home/a", None, None)),
    ],
)
def test_steps_and_ranks_are_read_from_the_name(named: str, expected: tuple[str, int | None, int | None]) -> None:
    found = chosen(named)
    assert (str(found.path), found.step, found.rank) == expected


def test_two_models_that_have_nothing_in_common_are_told_in_no_time(tmp_path: Path) -> None:
    for folder, kind in (("one", "a"), ("other", "b")):
        step = Step(tmp_path / folder)
        sites = [step.trace.site(f"aten.{kind}{n % 9}.default", module=f"{kind}.{n // 10}") for n in range(2_000)]
        for turn in range(4):
            for site in sites:
                seq = step.trace.op(site, **LIVE, max=float(turn))
                step.trace.edge(seq - 1, seq, **LIVE)
        step.close()
    began = time.perf_counter()
    found = compare(tmp_path / "one", tmp_path / "other")
    assert time.perf_counter() - began < 20
    assert {each.kind for each in found.differences[:2]} == {DifferenceKind.MODULE}
    assert [each.module for each in found.differences[:2]] == ["b", "a"]


def test_an_op_that_one_alone_runs_is_told_so() -> None:
    there = Divergence(
        step=3, other_step=3, op="aten.gelu.default", module="fc", source=None, error=None, tolerance=0.0, traced="live"
    )
    assert parted_in_words(replace(there, seq=1, other_seq=2)) == "The numbers part at step 3 with gelu in fc."
    assert parted_in_words(replace(there, seq=1)) == "The numbers part at step 3 with gelu in fc, which A alone runs."
    assert parted_in_words(replace(there, other_seq=1)).endswith("gelu in fc, which B alone runs.")
