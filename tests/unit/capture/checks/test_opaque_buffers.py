"""What a kernel keeps for its backward, laid out for one dtype, is never given to the kernel for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.trace.schema import AuditStatus
from tests.support.training.twin_runs import train_both
from tests.unit.capture.checks.audited_nets import WIDTH, Net, audits, loop, ops

BACKWARD = "ampscope_audit_test.keeps_backward.default"
ran_in: list[torch.dtype] = []


@torch.library.custom_op("ampscope_audit_test::keeps", mutates_args=())
def keeps(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x), x.new_zeros(x.nbytes, dtype=torch.uint8)


@torch.library.custom_op("ampscope_audit_test::keeps_backward", mutates_args=())
def keeps_backward(gradient: Tensor, y: Tensor, kept: Tensor) -> Tensor:
    ran_in.append(gradient.dtype)
    if gradient.nbytes != kept.numel():
        raise AssertionError("a kernel would have written past the end")
    return gradient * (1 - y * y)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
    y, kept = ctx.saved_tensors
    result: Tensor = keeps_backward(gradient, y, kept)
    return result


keeps.register_autograd(_backward, setup_context=_setup)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = keeps(self.fc(x))[0]
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x.unsqueeze(0))[0].squeeze(0)
        return out


def ask(scope: Any, step: int) -> None:
    if scope is not None and step == 1:
        scope.audit()


def test_an_op_that_takes_one_is_not_run_again(run_folder: Path) -> None:
    ran_in.clear()
    watched = train_both(loop(lambda: Net([Keeps()]), steps=2, before=ask), run_folder)
    (row,) = audits(watched)
    assert row.status == AuditStatus.DONE
    assert row.not_measured_ops == (BACKWARD,)
    assert ran_in.count(torch.float32) == 1, "in the reference step alone, whose forward gave it its own"
    (tanh,) = [op for site, op in ops(watched, row) if site.op == "ampscope_audit_test.keeps.default"]
    assert (tanh.local or 0.0) > 0


def _runs_lstm_in_bfloat16() -> bool:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(WIDTH, WIDTH)(torch.zeros(1, 1, WIDTH))
        except RuntimeError:
            return False
    return True


@pytest.mark.skipif(not _runs_lstm_in_bfloat16(), reason="torch has no LSTM in bfloat16 on this processor")
def test_a_recurrent_net_survives_its_audit(run_folder: Path) -> None:
    watched = train_both(loop(lambda: Net([Recurrent()]), torch.bfloat16, steps=2, before=ask), run_folder)
    (row,) = audits(watched)
    assert row.status == AuditStatus.DONE
    assert set(row.not_measured_ops) <= {"aten.mkldnn_rnn_layer_backward.default"}
    of_lstm = [op for site, op in ops(watched, row) if site.module == "blocks.0.lstm" and site.phase == "forward"]
    assert any((op.local or 0.0) > 0 for op in of_lstm)
