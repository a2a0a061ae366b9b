"""Cancellation that is planted in a layer comes first in the audit of the step; without it nothing stands out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.analysis.precision.audit import AuditReport, audit
from ampscope.analysis.precision.op_losses import PrecisionLoss
from tests.support.training.twin_runs import Loop, train_both
from tests.unit.capture.checks.audited_nets import Net, Shifted, Twins, loop, shifted

GRAVE = {PrecisionLoss.CANCELS, PrecisionLoss.COARSE}


def audited(training: Loop, folder: Path) -> AuditReport:
    found = audit(train_both(training, folder, audit_every=2).run)
    assert found is not None
    assert found.status == "done"
    return found


def is_quiet(found: AuditReport) -> bool:
    return found.sentence.startswith("No layer stands out") and not GRAVE & {layer.kind for layer in found.layers}


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.bfloat16, 100.0), (torch.float16, 300.0)], ids=["bf16", "fp16 and a scaler"]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_shifted_there_and_back(dtype: torch.dtype, shift: float, micro_batches: int, run_folder: Path) -> None:
    planted = audited(
        loop(shifted(0.0, shift, 0.0), dtype, steps=2, micro_batches=micro_batches), run_folder / "planted"
    )
    first = planted.layers[0]
    assert (first.module, first.kind) == ("blocks.1", PrecisionLoss.CANCELS)
    assert first.worst is not None
    assert (first.worst.op, first.worst.local) == ("aten.sub.Tensor", 0.0)
    assert first.worst.source is not None
    assert "self.shift" in first.worst.source.code
    assert planted.rounded_in == ("blocks.1",)
    assert planted.code == 'ampscope.keep_fp32(model, ["blocks.1"])'
    assert first.moves_loss > 5 * planted.layers[1].moves_loss
    assert is_quiet(
        audited(loop(shifted(0.0, 0.0, 0.0), dtype, steps=2, micro_batches=micro_batches), run_folder / "healthy")
    )


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 100.0), (torch.float16, 300.0)], ids=["bf16", "fp16"])
def test_a_difference_of_nearly_equal_activations(dtype: torch.dtype, offset: float, run_folder: Path) -> None:
    def net(by: float) -> Callable[[], nn.Module]:
        return lambda: Net([Shifted(0.0), Twins(by), Shifted(0.0)])

    planted = audited(loop(net(offset), dtype, steps=2), run_folder / "planted")
    assert (planted.layers[0].module, planted.layers[0].kind) == ("blocks.1", PrecisionLoss.CANCELS)
    assert set(planted.rounded_in) == {"blocks.1.first", "blocks.1.second"}
    assert {layer.module for layer in planted.layers[1:3]} == set(planted.rounded_in)
    assert is_quiet(audited(loop(net(0.0), dtype, steps=2), run_folder / "healthy"))


class ThereAndBack(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return (x + 500.0) - 500.0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # checkpointing is enabled by another name in later versions
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_in_a_transformer(checkpointed: bool, run_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def gpt2(*, planted: bool) -> Loop:
        def train(watch: Callable[..., Any]) -> Any:
            shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
            tokens = {"bos_token_id": 0, "eos_token_id": 0}
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens))
            if planted:
                model.transformer.h[1].mlp.act = ThereAndBack(model.transformer.h[1].mlp.act)
            if checkpointed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
            watch(model)
            for _ in range(2):
                words = torch.randint(0, 64, (4, 16))
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(words, labels=words, use_cache=False).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return [model, optimizer]

        return train

    found = audited(gpt2(planted=True), run_folder / "planted")
    assert (found.layers[0].module, found.layers[0].kind) == ("transformer.h.1.mlp.act", PrecisionLoss.CANCELS)
    assert found.not_measured == 0
    assert found.explained == pytest.approx(found.loss_error, rel=0.3)
    if not checkpointed:
        assert is_quiet(audited(gpt2(planted=False), run_folder / "healthy"))
