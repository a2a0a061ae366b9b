"""A small GPT-2 with everything that a ``Trainer`` needs, and one step that goes bad."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.support.training.twin_runs import exact_state, seed_everything

STEPS = 6
#: The step, counted from 0, in which `Overflowing` makes a layer overflow.
BAD_STEP = 3
#: The layer, what it calls next, and the op that overflows there.
LARGE, ORIGIN, OP = "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.act", "aten.pow.Tensor_Scalar"

VOCABULARY, WIDTH, TOKENS = 100, 32, 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Token numbers that are their own labels; the same ones for the same index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (TOKENS,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


class Overflowing(TrainerCallback):
    """Makes one layer's weights too large, from one step on."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == BAD_STEP:
            with torch.no_grad():
                model.get_submodule(LARGE).weight.mul_(self.factor)


def overflowing(precision: str) -> Overflowing:
    return Overflowing(2.0**13 if precision == "fp16" else 2.0**120)


def small_gpt2() -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 2 * TOKENS}
    rest: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", "use_cache": False}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **shape, **rest)
    return transformers.GPT2LMHeadModel(config)


def make_trainer(
    folder: Path,
    precision: str,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    trainer: type[Trainer] = Trainer,
    compute_loss_func: Callable[..., Tensor] | None = None,
    **arguments: Any,
) -> Trainer:
    """A trainer in bf16, or in fp16 with a scaler put where accelerate keeps it: on a CPU it makes none."""
    chosen = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    made = trainer(
        model=small_gpt2(),
        args=TrainingArguments(output_dir=str(folder), bf16=precision == "bf16", fp16=precision == "fp16", **chosen),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=list(callbacks),
        compute_loss_func=compute_loss_func,
    )
    if precision == "fp16":
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        made.accelerator.native_amp = True
    return made


def train(made: Trainer, **options: Any) -> dict[str, bytes]:
    """Trains; every bit of what is left, and of the losses on the way."""
    seed_everything()
    made.train(**options)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert made.model is not None
    return exact_state([made.model.state_dict(), made.optimizer, made.accelerator.scaler, losses])
