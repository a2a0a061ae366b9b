"""What the tracer says of ops whose dtypes, modules, lines and dataflow are known by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampscope.capture.torch_support.torch_private import HeldStorages
from ampscope.capture.tracing import dataflow
from ampscope.trace.schema import Cast, Node, Phase, Source
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, Forward, mlp, train
from tests.support.training.step_traces import Trace, line_of
from tests.support.training.twin_runs import Watched

HEALTHY = POISONED - 1  #: a step that is traced as it runs


@pytest.fixture
def trace(run_folder: Path) -> Callable[..., Trace]:
    """Trains under watch with every step traced, and gives the trace of a healthy step (or of the replay)."""

    def look(model: nn.Module, forward: Forward, *, replay: bool = False) -> Trace:
        run = Watched.train(lambda watch: train(watch, model, forward), run_folder, every=1).run
        return Trace(run, POISONED, Source.REPLAY) if replay else Trace(run, HEALTHY)

    return look


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        up = hidden.float()
        return up / (up.abs().sum() + 1e-8)


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    error = model(x) - y
    return (error * error).mean()


@pytest.mark.parametrize("replay", [False, True], ids=["live", "replay"])
class TestForward:
    def test_autocast_runs_the_linear_layer_in_half_precision(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), squared, replay=replay)
        op = traced.one("addmm", phase=Phase.FORWARD)
        assert op.site.in_dtypes == ("float16", "float16", "float16")
        assert op.site.out_dtypes == ("float16",)
        assert op.site.out_shapes == (f"{BATCH}x{WIDTH}",)
        assert (op.site.module, op.site.module_type, op.site.autocast) == ("first", "Linear", "float16")
        casts = [traced.at(edge.from_seq) for edge in op.inputs]
        assert [cast.site.cast for cast in casts] == [Cast.AUTOCAST] * 3
        assert sorted(traced.sources(cast)[0] for cast in casts) == ["args[0]", "first.bias", "first.weight"]
        assert {cast.site.in_dtypes for cast in casts} == {("float32",)}

    def test_a_conversion_the_user_wrote_is_explicit(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), squared, replay=replay)
        op = traced.one("_to_copy", phase=Phase.FORWARD, cast=Cast.EXPLICIT)
        assert (op.site.in_dtypes, op.site.out_dtypes) == (("float16",), ("float32",))
        assert op.site.line == line_of(Net, "hidden.float()")
        assert traced.sources(op) == ["aten.native_layer_norm.default"]

    def test_an_eps_is_kept_with_its_value_and_its_line(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), squared, replay=replay)
        op = traced.one("aten.add.", phase=Phase.FORWARD)
        assert 1e-8 in op.scalars.values()
        assert op.site.line == line_of(Net, "1e-8")
        assert op.site.code == "return up / (up.abs().sum() + 1e-8)"
        assert op.site.function == "Net.forward"
        assert Path(op.site.file).name == Path(__file__).name
        assert traced.one("native_layer_norm", phase=Phase.FORWARD).scalars["eps"] == 1e-5

    def test_code_after_the_model_is_the_loss(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), squared, replay=replay)
        op = traced.one("aten.sub")
        assert (op.site.phase, op.site.module) == (Phase.LOSS, "")
        assert op.site.line == line_of(squared, "model(x) - y")
        assert traced.sources(op)[0] == "aten.div.Tensor"

    def test_backward_ops_know_the_forward_op_they_belong_to(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), squared, replay=replay)
        for forward, backward, grad_fn in (
            ("native_layer_norm.default", "native_layer_norm_backward", "NativeLayerNormBackward0"),
            ("addmm", "aten.mm", "AddmmBackward0"),
            ("aten.abs", "aten.sgn", "AbsBackward0"),
        ):
            origin = traced.one(forward, phase=Phase.FORWARD).site
            for op in traced.find(backward, phase=Phase.BACKWARD):
                assert op.site.grad_fn == grad_fn
                assert op.site.forward_site == origin.site
                assert (op.site.module, op.site.line) == (origin.module, origin.line)
        assert traced.find("aten.mm", phase=Phase.BACKWARD)

    def test_the_mirror_of_a_cast_in_backward_has_the_same_reason(
        self, trace: Callable[..., Trace], replay: bool
    ) -> None:
        traced = trace(Net(), squared, replay=replay)
        mirrors = traced.find("_to_copy", phase=Phase.BACKWARD)
        assert {(op.site.cast, op.site.out_dtypes) for op in mirrors} == {
            (Cast.AUTOCAST, ("float32",)),  # gradients of weight and bias
            (Cast.EXPLICIT, ("float16",)),  # below .float()
        }

    def test_views_are_no_ops_on_numbers(self, trace: Callable[..., Trace], replay: bool) -> None:
        traced = trace(Net(), lambda m, x, y: squared(m, x, y).view(1).squeeze(0), replay=replay)
        assert not traced.find("aten.view")
        assert not traced.find("aten.t.")
        assert not traced.find("squeeze")


def test_only_the_users_ops_are_in_the_trace(trace: Callable[..., Trace]) -> None:
    """AMPscope's own copies and checks are not, although they run in the middle of the step."""
    ops = [row[0] for row in trace(mlp(), F_mse).calculation()]
    assert not [name for name in ops if "clone" in name or "norm" in name or "isfinite" in name or "aminmax" in name]


def F_mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:  # noqa: N802  # named as what it calls
    return F.mse_loss(model(x), y)


def test_autocast_raises_a_loss_to_single_precision(trace: Callable[..., Trace]) -> None:
    traced = trace(mlp(), F_mse)
    op = traced.one("mse_loss.default")
    assert op.site.in_dtypes == ("float32", "float32")
    cast = traced.at(op.inputs[0].from_seq)
    assert (cast.site.cast, cast.site.in_dtypes) == (Cast.AUTOCAST, ("float16",))


@pytest.mark.parametrize("write", ["x.half()", "x.to(torch.float16)", "x.type(torch.float16)", "x.to(other)"])
def test_every_way_to_ask_for_a_dtype_is_explicit(trace: Callable[..., Trace], write: str) -> None:
    convert = eval(f"lambda x, other: {write}", {"torch": torch})  # noqa: S307  # four lines of this file

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), convert(y, torch.zeros(1, dtype=torch.float16)).float())

    down = [op for op in trace(mlp(), forward).find("_to_copy", phase=Phase.LOSS) if op.site.out_dtypes == ("float16",)]
    assert [op.site.cast for op in down] == [Cast.EXPLICIT]


def test_an_island_without_autocast_says_so(trace: Callable[..., Trace]) -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.outer(x)
            with torch.autocast("cpu", enabled=False):
                return self.inner(hidden.float())

    traced = trace(Island(), F_mse)
    regions = {op.site.module: (op.site.autocast, op.site.out_dtypes) for op in traced.find("addmm")}
    assert regions == {"outer": ("float16", ("float16",)), "inner": ("", ("float32",))}


@pytest.mark.parametrize("replay", [False, True], ids=["live", "replay"])
def test_checkpointed_code_runs_again_as_recomputation(trace: Callable[..., Trace], replay: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    traced = trace(Checkpointed(), F_mse, replay=replay)
    first, second = traced.find("aten.relu")
    assert (first.site.phase, second.site.phase) == (Phase.FORWARD, Phase.RECOMPUTE)
    for column in ("module", "line", "autocast", "in_dtypes"):
        assert getattr(second.site, column) == getattr(first.site, column)
    assert {op.site.cast for op in traced.find("_to_copy", phase=Phase.RECOMPUTE)} == {Cast.AUTOCAST}


def test_a_gradient_of_a_gradient_is_backward_not_recomputation(trace: Callable[..., Trace]) -> None:
    def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
        return slope.pow(2).mean()

    traced = trace(mlp(), penalty)
    assert not traced.find("", phase=Phase.RECOMPUTE)
    assert traced.find("threshold_backward", phase=Phase.BACKWARD)


class TestDataflow:
    def test_a_write_in_place_becomes_the_source_of_the_next_reader(self, trace: Callable[..., Trace]) -> None:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            out = model(x).float()
            out.mul_(3.0)
            return out.sub(y).pow(2).mean()

        traced = trace(mlp(), forward)
        write = traced.one("aten.mul_")
        assert [edge.in_place for edge in write.inputs] == [True]
        assert traced.sources(write) == ["aten._to_copy.default"]
        assert traced.sources(traced.one("aten.sub"))[0] == write.site.op

    def test_a_write_into_a_part_is_followed_to_what_it_left_untouched(self, trace: Callable[..., Trace]) -> None:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            out = model(x).float()
            out[:, 0] = 5.0
            return out.sub(y).pow(2).mean()

        traced = trace(mlp(), forward, replay=True)
        write = traced.one("aten.fill_")
        assert write.site.out_shapes == (f"{BATCH}",)
        assert write.inputs[0].in_place
        assert traced.sources(write)[0] == "aten._to_copy.default"
        read = traced.one("aten.sub").inputs[0]
        assert (read.from_seq, read.partial) == (write.seq, True)
        assert read.min is not None
        assert read.max is not None
        assert read.min < 5.0 <= read.max

    def test_a_part_of_a_larger_result_has_statistics_of_its_own(self, trace: Callable[..., Trace]) -> None:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            both = torch.cat([model(x).float(), y + 1000.0])
            return both[:BATCH].pow(2).mean() + 0.0 * both[BATCH:].mean()

        traced = trace(mlp(), forward, replay=True)
        (edge,) = traced.find("aten.pow", phase=Phase.LOSS)[0].inputs
        assert edge.partial
        whole = traced.at(edge.from_seq).out
        assert whole.max is not None
        assert whole.max > 900.0
        assert edge.max is not None
        assert edge.max < 900.0

    def test_an_operand_written_in_place_enters_with_the_values_it_came_with(self, trace: Callable[..., Trace]) -> None:
        """A target that ``sqrt_`` turns into NaN was finite when it came in."""

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            roots = y.sqrt_()
            return (model(x).float() - roots.nan_to_num(0.0)).pow(2).mean()

        def ahead(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            model(x)  # opens the step, so that the target is first seen by sqrt_
            return forward(model, x, y)

        traced = trace(mlp(), ahead)
        write = traced.one("aten.sqrt_")
        assert math.isnan(write.out.min or 0.0)
        source = traced.at(write.inputs[0].from_seq)
        assert source.site.op == Node.INPUT
        assert source.out.min is not None
        assert source.out.min < 0.0, "the values before the write"

    def test_rows_of_one_buffer_are_told_apart(self, trace: Callable[..., Trace]) -> None:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            rows = torch.zeros(2, WIDTH)
            rows[0] = 1.0
            rows[1] = math.inf
            return (model(x).float() * rows[0]).pow(2).mean()

        traced = trace(mlp(), forward, replay=True)
        edge = traced.find("aten.mul", phase=Phase.LOSS)[0].inputs[1]
        writer = traced.at(edge.from_seq)
        finite = edge.max if edge.partial else writer.out.max
        assert finite == 1.0, "the operand is the row that holds ones, not the one written last"

    def test_uninitialised_memory_is_nobodys_result(self, trace: Callable[..., Trace]) -> None:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            out = model(x)
            room = torch.empty(BATCH, WIDTH)
            room.copy_(y)
            return F.mse_loss(out, room)

        traced = trace(mlp(), forward)
        assert not traced.find("aten.empty")
        assert len(traced.find("aten.copy_")) == 1


def test_outputs_have_the_values_the_loop_computed(run_folder: Path) -> None:
    seen: list[tuple[float, float]] = []

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x).float()
        seen.append((out.min().item(), out.max().item()))
        return F.mse_loss(out, y)

    run = Watched.train(lambda watch: train(watch, mlp(), forward), run_folder, every=1).run
    for step in range(POISONED):
        out = Trace(run, step).find("_to_copy", cast=Cast.EXPLICIT, phase=Phase.LOSS)[0].out
        assert (out.min, out.max) == seen[step]
    cast = Trace(run, POISONED, Source.REPLAY).find("_to_copy", cast=Cast.EXPLICIT, phase=Phase.LOSS)[0]
    replayed = cast.out.statistics
    assert (replayed.min, replayed.max) == seen[POISONED]
    assert (replayed.nan, replayed.posinf, replayed.neginf) == (0, 0, 0)
    assert sum(replayed.exp_counts or ()) + (replayed.zeros or 0) == BATCH * WIDTH


def test_a_replay_marks_where_the_walk_to_the_origin_starts(run_folder: Path) -> None:
    watched = Watched.train(lambda watch: train(watch, mlp()), run_folder)
    traced = Trace(watched.run, POISONED, Source.REPLAY)
    loss = traced.one(Node.LOSS, phase="")
    assert loss.out.max == pytest.approx(watched.state["losses"][POISONED] * 2.0**20 * 512, rel=1e-6)
    gradients = [op for op in traced.ops if op.site.op == Node.GRADIENT]
    assert {op.site.name for op in gradients} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {op.site.module for op in gradients} == {"0", "2"}
    assert all(math.isnan(op.out.max or 0.0) or math.isinf(op.out.max or 0.0) for op in gradients)


def test_micro_batches_are_numbered(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model, every=1)
        for _ in range(3):
            F.mse_loss(model(torch.randn(2, WIDTH)), torch.randn(2, WIDTH)).backward()
        optimizer.step()

    run = Watched.train(loop, run_folder).run
    assert [op.out.micro_batch for op in Trace(run, 0).find("addmm", module="0")] == [0, 1, 2]


def test_what_is_gone_within_a_step_is_forgotten_and_its_edges_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []
    sweep = HeldStorages.sweep

    def counted(held: HeldStorages) -> list[int]:
        found = sweep(held)
        swept.extend(found)
        return found

    def edges(folder: Path) -> list[list[str]]:
        run = Watched.train(lambda watch: train(watch, mlp()), folder, every=1).run
        seen = Trace(run, HEALTHY)
        return [[op.site.op, *seen.sources(op)] for op in seen.ops]

    monkeypatch.setattr(HeldStorages, "sweep", counted)
    whole = edges(tmp_path / "whole")
    assert swept == []  # the step is small
    monkeypatch.setattr(dataflow, "SWEPT_EVERY", 0)
    assert edges(tmp_path / "swept") == whole
    assert swept
