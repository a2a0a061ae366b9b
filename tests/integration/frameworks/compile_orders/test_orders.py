"""Each order trains the same bits with and without a watch; a bad step is told, and replayed where it was seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.frameworks.compile_orders.loops import (
    BAD_STEP,
    STEPS,
    Counting,
    Loop,
    Net,
    Order,
    compiled_autograd,
)
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import EXACT, Watched, train_both, train_unwatched

pytestmark = [  # dynamo's own, with or without a watch
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

#: The calls of the model are inside a compiled function, or the loss is, and nobody outside sees them.
HIDDEN = {Order.FORWARD_AND_LOSS, Order.FORWARD_AND_BACKWARD, Order.WHOLE_STEP, Order.LOSS}
INDUCTOR = [pytest.param(order, "inductor", marks=pytest.mark.slow) for order in Order]
EVERY = [*((order, "aot_eager") for order in Order), *INDUCTOR]
#: A bad step is told by what is seen around compiled code, whatever compiled it: two orders have Inductor, too.
BAD = [*EVERY[: len(Order)], *INDUCTOR[:2]]


@pytest.mark.parametrize(("order", "backend"), EVERY)
def test_a_healthy_loop_stays_as_it_is(order: Order, backend: str, run_folder: Path) -> None:
    watched = train_both(Loop(order, backend, bad=False), run_folder)
    diagnosis = ampscope.diagnose(watched.run)
    unseen = order in HIDDEN - {Order.LOSS}
    verdict = Verdict.NOT_OBSERVED if unseen else Verdict.HEALTHY
    assert (diagnosis.verdict, diagnosis.run.steps, diagnosis.findings) == (verdict, STEPS, ())
    assert ("compile the model alone" in diagnosis.summary) == unseen
    assert watched.warnings == []
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state[-1], rel=1e-6)


@pytest.mark.parametrize(("order", "backend"), BAD)
def test_a_bad_step_is_told(order: Order, backend: str, run_folder: Path) -> None:
    watched = train_both(Loop(order, backend, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert primary.step == BAD_STEP
    if order in HIDDEN:
        assert (primary.cause, primary.replay) == (Cause.UNKNOWN, ReplayStatus.UNAVAILABLE)
        assert "torch.compile compiled is not seen" in primary.explanation
    else:
        assert (primary.cause, primary.op, primary.module) == (Cause.DIV_ZERO, "aten.div.Tensor", "norm")
        assert watched.replay_of(BAD_STEP) == EXACT


@pytest.mark.parametrize("order", Order)
def test_watching_adds_neither_compilations_nor_graphs(order: Order, run_folder: Path) -> None:
    counts = []
    for watch in (False, True):
        backend = Counting()
        loop = Loop(order, backend, bad=False)
        Watched.train(loop, run_folder) if watch else train_unwatched(loop)
        counts.append((backend.compiled, backend.ran))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("order", [Order.FORWARD_AND_BACKWARD, Order.WHOLE_STEP, Order.OPTIMIZER])
def test_no_code_of_our_own_is_compiled(order: Order, autograd: bool, run_folder: Path) -> None:
    """Below a compiled function that broke its graph, every frame is offered to Dynamo."""
    torch._dynamo.reset()
    with compiled_autograd() if autograd else contextlib.nullcontext():
        Watched.train(Loop(order, "aot_eager", bad=True), run_folder)
    codes = [known() for known in torch._dynamo.convert_frame.output_codes.seen]
    assert codes, "something was compiled"
    own = str(Path(ampscope.__file__).parent)
    assert [code for code in codes if code is not None and code.co_filename.startswith(own)] == []


@pytest.mark.parametrize("order", [Order.IN_PLACE, Order.RAW_WATCHED, Order.FORWARD_AND_BACKWARD])
def test_compiled_autograd_stays_as_it_is(order: Order, run_folder: Path) -> None:
    with compiled_autograd():
        watched = train_both(Loop(order, "aot_eager", bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert primary.step == BAD_STEP
    if order not in HIDDEN:
        assert (primary.module, *watched.replay_of(BAD_STEP)) == ("norm", *EXACT)


@pytest.mark.parametrize("order", [Order.RAW_WATCHED, Order.RAW_WATCHED_FIRST, Order.COMPILED_WATCHED])
def test_torch_has_nothing_to_warn_of(order: Order, run_folder: Path) -> None:
    """Hooks on all modules, which find out what a loop calls, would have it warn of each compiled module."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Watched.train(Loop(order, "eager", bad=False), run_folder)
    assert [each for each in told if "global hooks" in str(each.message)] == []


def test_what_only_compiled_code_does_is_told_as_that(run_folder: Path) -> None:
    """A backend that computes otherwise than eager code: the replay is eager, and comes out finite."""
    runs = []

    def spoiling(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(1)
            return [out * (float("nan") if len(runs) == BAD_STEP + 1 else 1.0) for out in graph(*args)]

        return run

    def loop(watch: Callable[..., object]) -> Any:
        runs.clear()
        return Loop(Order.IN_PLACE, spoiling, bad=False)(watch)

    watched = train_both(loop, run_folder)
    primary = primary_incident(watched.run)
    assert (primary.step, primary.cause, primary.replay) == (
        BAD_STEP,
        Cause.COMPILED_ONLY,
        ReplayStatus.NOT_REPRODUCED,
    )


def test_a_model_under_data_parallelism_is_known_through_its_compiled_form(run_folder: Path, tmp_path: Path) -> None:
    """A group of one rank: the raw model is watched, the loop calls what was compiled of its wrapper."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    class Wrapped(Loop):
        def __call__(self, watch: Callable[..., object]) -> Any:
            torch._dynamo.reset()
            model = Net()
            watch(model)
            called = torch.compile(nn.parallel.DistributedDataParallel(model), backend="aot_eager")
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for number in range(STEPS):
                x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
                x[3] *= number != BAD_STEP
                nn.functional.cross_entropy(called(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [model, optimizer]

    try:
        watched = train_both(Wrapped(Order.RAW_WATCHED, None, bad=True), run_folder)
    finally:
        torch.distributed.destroy_process_group()
    primary = primary_incident(watched.run)
    assert (primary.step, primary.op, primary.module) == (BAD_STEP, "aten.div.Tensor", "norm")
    assert watched.replay_of(BAD_STEP) == EXACT
