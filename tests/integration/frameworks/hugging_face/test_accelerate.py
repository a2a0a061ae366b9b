"""``ampscope.watch(accelerator)``: the same bits, right counts, and a failure named with the user's own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import ampscope
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind, ReplayStatus, Table
from tests.integration.frameworks.hugging_face.small_accelerator import (
    ACCUMULATE,
    BAD_STEP,
    STEPS,
    forget_accelerate,
    make_accelerator,
    train,
)
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import differences

COMPILED = pytest.param({"dynamo_backend": "aot_eager"}, marks=pytest.mark.slow)


def trained(folder: Path, precision: str, *, bad: bool = False, **options: Any) -> ampscope.Run:
    """A training that is the same, bit for bit, with and without a watch; its run."""
    expected = train(make_accelerator(precision, **options), bad=bad)
    forget_accelerate()
    scopes: list[ampscope.Scope] = []

    def watch(accelerator: Accelerator) -> None:
        scopes.append(ampscope.watch(accelerator, dir=folder / "run", quiet=True))

    watched = train(make_accelerator(precision, **options), watch, bad=bad)
    for scope in scopes:
        scope.close()
    assert differences(watched, expected) == []
    return ampscope.open_run(folder / "run")


@pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_healthy_training(precision: str, options: dict[str, Any], tmp_path: Path) -> None:
    run = trained(tmp_path, precision, **options)
    assert ampscope.diagnose(run).verdict == "healthy"
    steps = run.rows(Table.STEPS)
    assert [row.step for row in steps] == list(range(STEPS))
    assert {row.micro_batches for row in steps} == {ACCUMULATE}
    assert all((row.scale is not None) == (precision == "fp16") for row in steps)
    assert run.rows(Table.FINDINGS) == []
    assert run.rows(Table.EVENTS, kind=EventKind.WARNING) == []


@pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_value_that_does_not_fit(precision: str, options: dict[str, Any], tmp_path: Path) -> None:
    run = trained(tmp_path, precision, bad=True, **options)
    first = run.rows(Table.INCIDENTS)[0]
    assert (first.step, first.replay, first.replay_reason) == (BAD_STEP, ReplayStatus.EXACT, "")
    assert [row.step for row in run.rows(Table.STEPS) if row.skipped] == ([BAD_STEP] if precision == "fp16" else [])
    assert run.rows(Table.FINDINGS) == []
    primary = primary_incident(run)
    assert (primary.step, primary.cause, primary.module) == (BAD_STEP, "fp16_overflow", "")
    assert primary.source is not None
    assert primary.source.function == "square_in_half"


def test_an_accelerator_that_has_prepared_nothing_is_refused() -> None:
    with pytest.raises(WatchError, match=r"after accelerator\.prepare"):
        ampscope.watch(make_accelerator("bf16"))


def clip_scaled(accelerator: Any, network: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def clip_what_is_unscaled_twice(accelerator: Any, network: Any, optimizer: Any) -> None:
    accelerator.scaler.unscale_(optimizer)  # the wrapper; its step unscales for the optimizer within
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)


@pytest.mark.parametrize(
    ("clip", "cause", "code"),
    [
        (clip_scaled, "misuse_clip_before_unscale", "accelerator.clip_grad_norm_("),
        (clip_what_is_unscaled_twice, "misuse_multiple_scalers_update", "accelerator.unscale_gradients(optimizer)"),
    ],
)
def test_a_mistake_is_mended_in_terms_of_the_accelerator(clip: Any, cause: str, code: str, tmp_path: Path) -> None:
    scopes: list[ampscope.Scope] = []

    def watch(accelerator: Accelerator) -> None:
        scopes.append(ampscope.watch(accelerator, dir=tmp_path / "run", quiet=True))

    train(make_accelerator("fp16"), watch, clip=clip)
    scopes[0].close()
    (finding,) = ampscope.diagnose(tmp_path / "run").findings
    assert finding.cause == cause
    assert finding.source is not None
    assert finding.source.function == clip.__name__
    assert finding.remedies[0].code.startswith(code)


def test_a_loss_that_is_scaled_by_hand_is_scaled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make_accelerator("fp16")
    scales: Any = accelerator.backward

    def scale_and_backward(loss: torch.Tensor) -> None:
        scales(accelerator.scaler.scale(loss))

    monkeypatch.setattr(accelerator, "backward", scale_and_backward)
    scopes: list[ampscope.Scope] = []
    train(accelerator, lambda each: scopes.append(ampscope.watch(each, dir=tmp_path / "run", quiet=True)))
    scopes[0].close()
    (finding,) = ampscope.diagnose(tmp_path / "run").findings
    assert "scaled already" in finding.explanation
    assert finding.source is not None
    assert finding.source.code == "scales(accelerator.scaler.scale(loss))"
    assert finding.remedies[0].code == "accelerator.backward(loss)"
