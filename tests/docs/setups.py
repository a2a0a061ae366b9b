"""What the code blocks of the guides need around them: names that they use, and files where they run."""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT, SAMPLES

Names = dict[str, Any]
SCRIPTS = ROOT / "docs" / "making" / "samples"


def nothing() -> Names:
    return {}


def loop() -> Names:
    """The parts of a small fp16 training."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "scaler": torch.amp.GradScaler("cpu", init_scale=256.0),
        "criterion": nn.MSELoss(),
        "loader": [(torch.randn(4, 8), torch.ones(4, 1)) for _ in range(4)],
    }


def gpt() -> Names:
    """A model with the names of blocks that people have."""
    from torch import nn

    block = {"attn": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    layers = [nn.ModuleDict(block) for _ in range(4)]
    return {"model": nn.ModuleDict({"blocks": nn.ModuleList(layers), "decoder": nn.ModuleList(layers[:1])})}


def data_parallel() -> Names:
    """A process group of one rank."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return {**loop(), "DistributedDataParallel": DistributedDataParallel, "close": dist.destroy_process_group}


def lightning() -> Names:
    """A module and a trainer that ends after some steps."""
    import lightning.pytorch as pl
    import torch

    parts = loop()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = parts["model"]

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.ones(16, 1))
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = functools.partial(pl.Trainer, max_steps=4, logger=False, enable_checkpointing=False, **quiet)
    return {"Trainer": trainer, "model": Module(), "loader": torch.utils.data.DataLoader(data, batch_size=4)}


def fabric() -> Names:
    """What Fabric sets up."""
    from lightning.fabric import Fabric

    return {**loop(), "fabric": Fabric(accelerator="cpu", precision="bf16-mixed")}


def transformers() -> Names:
    """A tiny model of transformers, its data, and a Trainer's arguments."""
    import torch

    hf: Any = importlib.import_module("transformers")
    config = hf.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = [{"input_ids": row, "labels": row} for row in torch.randint(1, 32, (8, 16))]
    options: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = hf.TrainingArguments("output_dir", save_strategy="no", **options)
    return {"Trainer": hf.Trainer, "model": hf.GPT2LMHeadModel(config), "args": arguments, "data": tokens}


def accelerate() -> Names:
    """An accelerator, and what it is to prepare."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.data import DataLoader

    def reset() -> None:
        AcceleratorState._reset_state()
        PartialState._reset_state()

    parts = loop()
    rows: Any = [row for batch in parts["loader"] for row in zip(*batch, strict=True)]
    return {**parts, "loader": DataLoader(rows, batch_size=4), "accelerator": Accelerator(cpu=True), "close": reset}


def pytest() -> Names:
    """A function that trains."""
    import torch

    def train(model: Any, scaler: Any) -> None:
        parts = loop()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for x, y in parts["loader"]:
            with torch.autocast("cpu", torch.float16):
                loss = parts["criterion"](model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return {**loop(), "train": train}


def runs() -> Names:
    """Recorded runs: one that broke, two to compare."""
    folder = Path("ampscope_runs")
    for name, sample in {"RUN": "attention-overflow", "A": "log-zero", "B": "healthy", "HEALTHY": "healthy"}.items():
        shutil.copytree(SAMPLES / sample, folder / name)
    return {}


def checkout() -> Names:
    """The recorded runs where the checkout has them."""
    shutil.copytree(SAMPLES, "sample_logs")
    return {}


def trained() -> Names:
    """The same, but the one that broke has just been trained by ``train.py``, with all that may be asked for."""
    import runpy

    runs()
    shutil.rmtree("ampscope_runs/RUN")
    options = 'dir="ampscope_runs/RUN", save_tensors=True, audit_every=8, every=4'
    text = (SCRIPTS / "plain_loop.py").read_text("utf-8").replace("(model, scaler)", f"(model, scaler, {options})")
    Path("train.py").write_text(text, "utf-8")
    runpy.run_path("train.py")
    return {}


def script(name: str) -> Callable[[], Names]:
    """The folder has one of the samples."""

    def setup() -> Names:
        shutil.copy(SCRIPTS / name, name)
        return {}

    return setup


def transformers_run() -> Names:
    """The run of a training with transformers."""
    shutil.copytree(SAMPLES / "healthy", "output_dir/_ampscope")
    return {}


def tracker() -> Names:
    """A writer for TensorBoard, and the address of a chat that nobody serves."""
    import os

    os.environ["SLACK_WEBHOOK"] = "http://127.0.0.1:9/"
    writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter("logs")
    return {**loop(), "writer": writer, "close": writer.close}


SETUPS: dict[str, Callable[[], Names]] = {
    "": nothing,
    **{
        each.__name__: each
        for each in (
            *(loop, gpt, data_parallel, lightning, fabric, transformers, accelerate, pytest),
            *(runs, checkout, trained, transformers_run, tracker),
        )
    },
    "plain_loop": script("plain_loop.py"),
    "lightning_nan": script("lightning_nan.py"),
}
