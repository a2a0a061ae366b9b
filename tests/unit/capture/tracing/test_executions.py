"""An op is known again only where all that makes its site is as it was; a trace is the same whether it is or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.executions import Circumstances, Made, Met
from ampscope.capture.tracing.operators import describe
from ampscope.trace.schema import Phase, Table
from tests.support.training.small_loop import make_scaler

HERE = Place(pytest.fixture.__code__, 7)
UNDER: dict[str, Any] = {"phase": Phase.FORWARD, "module": "part", "function": "sum", "autocast": torch.float16}
FLOATS = torch.ones(2, 3)
MADE = Made(4, (2,), ((0, False),))
GIVEN: tuple[Any, ...] = ((FLOATS, [1]), {"dtype": None}, [torch.ones(2)], [])
SUM = describe(torch.ops.aten.sum.dim_IntList)


def known(args: Any, kwargs: Any, results: Any, written: Any) -> Made | None:
    """What is known of an execution, after that of ``GIVEN``."""
    now = Circumstances(place=HERE, **UNDER)
    now.ran(SUM.name, (GIVEN[0], GIVEN[1]), GIVEN[2], (), MADE)
    again = now.again(SUM, (args, kwargs), results, written)
    return again[0] if again is not None else None


def test_what_is_as_it_was_is_known() -> None:
    assert known(*GIVEN) is MADE
    assert known((torch.zeros(2, 3), [1]), {"dtype": None}, [torch.zeros(2)], ()) is MADE


@pytest.mark.parametrize(
    ("at", "other"),
    [
        (0, (FLOATS, [0])),
        (0, (FLOATS, (1,))),
        (0, (FLOATS, [1], True)),
        (0, ([FLOATS], [1])),
        (0, (FLOATS.half(), [1])),
        (0, (torch.ones(3, 2), [1])),
        (0, (nn.Parameter(FLOATS), [1])),
        (0, (FLOATS.to_sparse(), [1])),
        (1, {"dtype": torch.float32}),
        (1, {}),
        (2, [torch.ones(3)]),
        (2, [torch.ones(2), torch.ones(2)]),
        (3, [FLOATS]),
    ],
)
def test_what_differs_is_not(at: int, other: Any) -> None:
    given = [*GIVEN]
    given[at] = other
    assert known(*given) is None


@pytest.mark.parametrize(
    "argument", [torch.Generator(), object(), [object()], torch.ones(2).to_sparse(), [torch.ones(2).to_sparse()]]
)
def test_what_cannot_be_compared_is_not_remembered(argument: Any) -> None:
    now = Circumstances(place=HERE, **UNDER)
    now.ran("sum", ((argument,), {}), [torch.ones(2)], (), MADE)
    now.ran("sum", ((), {"generator": argument}), [torch.ones(2)], (), MADE)
    now.ran("sum", ((FLOATS,), {}), [torch.ones(2).to_sparse()], (), MADE)
    assert not now.executions


def test_few_executions_are_remembered_the_latest_first() -> None:
    now = Circumstances(place=HERE, **UNDER)
    for size in range(1, 30):
        now.ran("sum", ((torch.ones(size),), {}), [torch.ones(())], (), Made(size, (1,)))
    sites = [execution.made.site for execution in now.executions["sum"]]
    assert sites[0] == 29
    assert len(sites) < 10


@pytest.mark.parametrize(
    "other",
    [
        {"phase": Phase.LOSS},
        {"module": None},
        {"function": "add"},
        {"autocast": None},
        {"grad_fn": "SumBackward0"},
        {"forward_site": 1},
        {"place": Place(HERE.code, 8)},
        {"place": Place(pytest.mark.__class__.__init__.__code__, 7)},
    ],
)
def test_circumstances_are_the_same_object_if_nothing_differs(other: dict[str, Any]) -> None:
    met = Met()
    first = met.of(HERE, **UNDER)
    assert met.of(HERE, **UNDER) is first
    assert met.of(**{"place": HERE, **UNDER, **other}) is not first


# -- a trace with and without ------------------------------------------------------------------------------------------

Forward = Callable[[nn.ModuleList, Tensor, int], Tensor]


def _dropout(parts: nn.ModuleList, x: Tensor, _: int) -> Tensor:
    return F.dropout(F.gelu(parts[0](x)), 0.2) + parts[1](x) * 2


def _as_many_as_are_positive(parts: nn.ModuleList, x: Tensor, _: int) -> Tensor:
    h = parts[0](x)
    chosen = h[:, 0] > 0
    return h.index_add(0, chosen.nonzero()[:, 0], parts[1](h[chosen]))


def _branches(parts: nn.ModuleList, x: Tensor, step: int) -> Tensor:
    x = parts[step % 2](x) * step
    for _ in range(step % 3):
        x = torch.tanh(x) + 1
    return x + 1 + 1.0


def _in_place(parts: nn.ModuleList, x: Tensor, _: int) -> Tensor:
    h = parts[0](x).clone().add_(1).mul_(2)
    h.add_(h)
    return parts[1](h).masked_fill(h > 1, 0.5)


def _views(parts: nn.ModuleList, x: Tensor, _: int) -> Tensor:
    h = parts[0](x)
    a, b = h.chunk(2, -1)
    return torch.cat([a * b, torch.stack([a, a]).sum(0)], -1) + h.expand(2, *h.shape).sum(0) + h.t()[::2].sum()


def _recomputed(parts: nn.ModuleList, x: Tensor, _: int) -> Tensor:
    return checkpoint(lambda h: F.dropout(parts[1](parts[0](h)), 0.1), x, use_reentrant=False)


def _sizes(parts: nn.ModuleList, x: Tensor, step: int) -> Tensor:
    return parts[1](parts[0](x[: 2 + step % 2])).sum() + x


FORWARDS = [_dropout, _as_many_as_are_positive, _branches, _in_place, _views, _recomputed, _sizes]


def _trace(forward: Forward, folder: Path) -> list[Any]:
    """Every row that tells of the ops of a few traced steps."""
    torch.manual_seed(0)
    parts, scaler = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), make_scaler()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor, step: int) -> Tensor:
            return forward(self.parts, x, step)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ampscope.watch(model, scaler, dir=folder, every=1):
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(4, 8), step).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run = ampscope.open_run(folder)
    return [*run.rows(Table.SITES), *run.rows(Table.OPS), *run.rows(Table.EDGES)]


class _KeepsNothing(dict[Any, Any]):
    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Forgets it."""


def _new(met: Met, place: Place, **under: Any) -> Circumstances:
    met.evaluations = _KeepsNothing()
    return Circumstances(place, **under)


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_trace_is_the_same_if_nothing_is_known_again(
    forward: Forward, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_again = []
    again = Circumstances.again

    def counted(self: Circumstances, *ran: Any) -> Any:
        known = again(self, *ran)
        known_again.append(known is not None)
        return known

    monkeypatch.setattr(Circumstances, "again", counted)
    with_memory = _trace(forward, run_folder.with_name("with"))
    assert sum(known_again) > 40, "else this shows nothing"
    monkeypatch.setattr(Circumstances, "ran", lambda *_: None)
    monkeypatch.setattr(Met, "of", _new)
    assert list(map(str, with_memory)) == list(map(str, _trace(forward, run_folder.with_name("without"))))
