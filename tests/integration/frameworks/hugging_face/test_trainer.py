"""The Trainer of transformers under `WatchCallback`: the same bits, right counts, and a failure named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

import ampscope
from ampscope.integrations.transformers import WatchCallback
from ampscope.trace.schema import EventKind, ReplayStatus, Table
from tests.integration.frameworks.hugging_face.small_trainer import (
    BAD_STEP,
    OP,
    ORIGIN,
    STEPS,
    make_trainer,
    overflowing,
    train,
)
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import differences

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and label smoothing": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    "evaluation on the way": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 16},
    "gradient checkpointing without clipping": {"activation_checkpointing": True, "max_grad_norm": 0.0},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}
EACH = [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in SETTINGS]
PRECISIONS = ("bf16", "fp16")

#: What dynamo itself does where the model breaks its graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def trained(folder: Path, precision: str, callbacks: list[TrainerCallback], **arguments: Any) -> ampscope.Run:
    """A training that is the same, bit for bit, with and without a watch; its run."""
    expected = train(make_trainer(folder / "unwatched", precision, callbacks, **arguments))
    watched = make_trainer(folder, precision, [*callbacks, WatchCallback(quiet=True)], **arguments)
    assert differences(train(watched), expected) == []
    return ampscope.open_run(folder / "_ampscope")


@pytest.mark.parametrize("setting", EACH)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_healthy_training(precision: str, setting: str, tmp_path: Path) -> None:
    arguments = SETTINGS[setting]
    run = trained(tmp_path, precision, [], **arguments)
    assert ampscope.diagnose(run).verdict == "healthy"
    steps = run.rows(Table.STEPS)
    assert [row.step for row in steps] == list(range(STEPS))
    assert {row.micro_batches for row in steps} == {arguments.get("gradient_accumulation_steps", 1)}
    assert {row.skipped for row in steps} == {False}
    assert all((row.scale is not None) == (precision == "fp16") for row in steps)
    assert run.rows(Table.FINDINGS) == []
    assert run.rows(Table.EVENTS, kind=EventKind.WARNING) == []


@pytest.mark.parametrize("setting", EACH)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_that_overflows(precision: str, setting: str, tmp_path: Path) -> None:
    last = STEPS if precision == "fp16" else BAD_STEP + 1  # without a scaler the bad step poisons all that follow
    run = trained(tmp_path, precision, [overflowing(precision)], **{**SETTINGS[setting], "max_steps": last})
    bad = list(range(BAD_STEP, last))
    incidents = run.rows(Table.INCIDENTS)
    assert [(row.step, row.replay, row.replay_reason) for row in incidents] == [
        (n, ReplayStatus.EXACT, "") for n in bad
    ]
    assert [row.step for row in run.rows(Table.STEPS) if row.skipped] == (bad if precision == "fp16" else [])
    assert run.rows(Table.FINDINGS) == []
    primary = primary_incident(run)
    assert (primary.step, primary.module, primary.op) == (BAD_STEP, ORIGIN, OP)
    assert primary.source is not None
    assert primary.source.file.endswith("transformers/activations.py")


def negative_log_likelihood(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the user's own: a probability that is too small for its dtype has no logarithm."""
    likely = outputs.logits.softmax(-1).gather(-1, labels[..., None])
    return -likely.log().mean()


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = negative_log_likelihood(outputs, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "own",
    [{"compute_loss_func": negative_log_likelihood}, {"trainer": OwnLoss}],
    ids=["compute_loss_func", "compute_loss"],
)
def test_the_users_own_loss_is_named_with_its_line(own: dict[str, Any], tmp_path: Path) -> None:
    class Sure(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == BAD_STEP:
                with torch.no_grad():
                    model.transformer.ln_f.weight.mul_(-(2.0**12))

    run = trained(tmp_path, "bf16", [Sure()], max_steps=BAD_STEP + 1, **own)
    primary = primary_incident(run)
    assert (primary.step, primary.replay, primary.op) == (BAD_STEP, ReplayStatus.EXACT, "aten.log.default")
    assert primary.source is not None
    assert primary.source.function == "negative_log_likelihood"


def test_on_a_cpu_without_a_scaler_fp16_is_float32(tmp_path: Path) -> None:
    """What the guide says of a CPU run: accelerate switches fp16 off there, and the trace shows it."""
    made = make_trainer(tmp_path, "fp16", [WatchCallback(quiet=True)])
    made.accelerator.scaler, made.accelerator.native_amp = None, False  # as accelerate leaves them on a CPU
    made.train()
    run = ampscope.open_run(tmp_path / "_ampscope")
    assert {row.scale for row in run.rows(Table.STEPS)} == {None}
    assert {row.autocast for row in run.rows(Table.SITES)} == {""}
    assert ampscope.diagnose(run).verdict == "healthy"
