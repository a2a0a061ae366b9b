"""Ops that change a tensor's shape in place: they round nothing, and no other op's error meets the wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from ampscope.trace.schema import AuditRow, AuditStatus
from tests.support.training.twin_runs import train_both
from tests.unit.capture.checks.audited_nets import ROWS, WIDTH, Net, audits, loop


class Turned(nn.Module):
    """Scales what it is given, the other way round."""

    def __init__(self, turn: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.fc, self.back = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(self.turn(self.fc(x).t().contiguous() * 1.7) * 1.3)
        return out


class Recurrent(nn.Module):
    """Turns what its loop gave in place, for the batch comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gru = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH // 4, WIDTH // 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(self.fc(x).view(ROWS, 4, -1))[0].reshape(x.shape)
        return out


def audited(block: Callable[[], nn.Module], folder: Path) -> AuditRow:
    def ask(scope: Any, step: int) -> None:
        if scope is not None and step == 1:
            scope.audit()

    watched = train_both(loop(lambda: Net([block()]), steps=2, before=ask), folder)
    assert watched.warnings == []
    (row,) = audits(watched)
    assert (row.status, row.reason, row.not_measured_ops) == (AuditStatus.DONE, "", ())
    return row


@pytest.mark.parametrize("width", [ROWS, 2 * ROWS], ids=["square", "oblong"])
@pytest.mark.parametrize("turn", [Tensor.t_, lambda x: x.transpose_(0, 1)], ids=["t_", "transpose_"])
def test_a_view_in_place_is_one_out_of_place(turn: Any, width: int, run_folder: Path) -> None:
    in_place = audited(lambda: Turned(turn, width), run_folder / "in place")
    view = audited(lambda: Turned(Tensor.t, width), run_folder / "view")
    assert view.explained
    assert in_place.explained == pytest.approx(view.explained, rel=1e-5)


def test_a_recurrent_net_whose_batch_comes_first(run_folder: Path) -> None:
    assert audited(Recurrent, run_folder).explained is not None
