"""What watching costs where people train: a Trainer of Lightning, one of transformers, and two ranks of DDP.

    python benchmarks/frameworks.py
    python benchmarks/frameworks.py --trainings ddp --steps 60

Each training is there twice, unwatched and watched in the default mode, and the two take turns in short blocks of
steps, in an order that changes each round; a ratio is taken within a round. The first 20 steps are left out: AMPscope
looks closely at a run's start. A framework runs its own loop, so each of its trainings has a thread, which goes on when
it is its turn: the data loader waits for that. On ranks, all of them take the same turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Block, machine
from torch import Tensor, nn
from torch.utils.data import DataLoader
from turns import Plan, Runs, Turns, ratios, take_turns
from workload import CLASSES, FRAME, Place, Size, Transformer

import ampscope

RESULTS = Path(__file__).parent / "results" / "frameworks.json"
#: Of 50 ms or more on the processors that it was chosen on.
SIZE = Size(width=256, layers=4, heads=4, batch=8, length=64)
RANKS = 2
#: The ratios that AMPscope means to keep to.
LIMITS = {"lightning": 1.05, "transformers": 1.05, "ddp": 1.03}
VARIANTS = ("unwatched", "watched")


# -- frameworks that run the loop ---------------------------------------------------------------------------------


def lightning(folder: Path, plan: Plan, *, watched: bool) -> Turns:
    """A Trainer of Lightning in bf16."""
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(SIZE)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    turns, module = Turns(_frames(), plan), Module()
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=plan.all_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def train() -> None:
        with ampscope.watch(module, dir=folder / "run", quiet=True) if watched else nullcontext():
            trainer.fit(module, DataLoader(turns, batch_size=None))

    turns.begin(train)
    return turns


def transformers(folder: Path, plan: Plan, *, watched: bool) -> Turns:
    """A Trainer of transformers, a GPT-2 in bf16."""
    import transformers as hugging_face

    from ampscope.integrations.transformers import WatchCallback

    hugging_face.logging.set_verbosity(logging.ERROR)
    torch.manual_seed(0)
    config = hugging_face.GPT2Config(
        n_embd=SIZE.width,
        n_layer=SIZE.layers,
        n_head=SIZE.heads,
        n_positions=SIZE.length,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    ids = torch.randint(0, 1000, (SIZE.batch, SIZE.length))
    turns = Turns({"input_ids": ids, "labels": ids.clone()}, plan)
    arguments = hugging_face.TrainingArguments(
        output_dir=str(folder),
        max_steps=plan.all_steps,
        per_device_train_batch_size=1,  # of the items that `Turns` gives, each of which is a batch
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = hugging_face.Trainer(
        model=hugging_face.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=turns,
        data_collator=lambda items: items[0],
        callbacks=[WatchCallback(quiet=True)] if watched else [],
    )
    trainer.remove_callback(hugging_face.PrinterCallback)
    turns.begin(trainer.train)
    return turns


# -- ranks --------------------------------------------------------------------------------------------------------


class DataParallel:
    """A loop of one's own around ``DistributedDataParallel``, one rank of it."""

    def __init__(self, folder: Path, *, watched: bool) -> None:
        torch.manual_seed(0)
        self._model = nn.parallel.DistributedDataParallel(Transformer(SIZE))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = _frames()
        self._scope = ampscope.watch(self._model, dir=folder, quiet=True) if watched else None

    def run(self, steps: int) -> None:
        """Makes some steps, with all ranks."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(self._model(self._batch[0]).flatten(0, 1), self._batch[1])
            torch.autograd.backward(loss)
            self._optimizer.step()
        dist.barrier()

    def finish(self) -> None:
        """Ends the run."""
        if self._scope is not None:
            self._scope.close()


def _rank(rank: int, folder: Path, plan: Plan) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    trainings: dict[str, Runs] = {name: DataParallel(folder / "run", watched=name == "watched") for name in VARIANTS}
    took = take_turns(trainings, plan)
    if rank == 0:
        (folder / "took.json").write_text(
            json.dumps({name: list(map(asdict, blocks)) for name, blocks in took.items()})
        )
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


def ddp(folder: Path, plan: Plan) -> dict[str, list[Block]]:
    """How long a step took on the first of several ranks."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, folder, plan)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    took = json.loads((folder / "took.json").read_text())
    return {name: [Block(**block) for block in blocks] for name, blocks in took.items()}


# -- the whole ----------------------------------------------------------------------------------------------------


def _frames() -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE.batch, SIZE.length, FRAME), torch.randint(0, CLASSES, (SIZE.batch * SIZE.length,))


def measure(training: str, plan: Plan) -> dict[str, list[Block]]:
    """How long a step took, block by block, in the unwatched and the watched training."""
    with tempfile.TemporaryDirectory() as folder:
        if training == "ddp":
            return ddp(Path(folder), plan)
        begin = {"lightning": lightning, "transformers": transformers}[training]
        trainings: dict[str, Runs] = {
            name: begin(Path(folder) / name, plan, watched=name == "watched") for name in VARIANTS
        }
        return take_turns(trainings, plan)


def summarize(training: str, took: dict[str, list[Block]]) -> dict[str, Any]:
    """One JSON-ready row: the step's time, the ratios with their quartiles, and what the first is meant to keep to."""
    step = statistics.median(block.wall for block in took["unwatched"])
    row = {"step_s": step, "limit": LIMITS[training], "rounds": len(took["watched"])}
    return {**row, "wall_ratio": ratios(took, "wall"), "cpu_ratio": ratios(took, "cpu")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each training")
    parser.add_argument("--block", type=int, default=5, help="steps in a turn")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of the frameworks, on settings that a benchmark has
    torch.set_num_threads(1)
    facts = machine(Place("cpu", torch.bfloat16, 1))
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    plan = Plan(args.steps, args.block)
    rows = {}
    for training in args.trainings:
        row = rows[training] = summarize(training, measure(training, plan))
        low, middle, high = row["wall_ratio"]
        kept = "within" if middle <= row["limit"] else "past"
        print(
            f"  {training:14} {row['step_s'] * 1e3:7.1f} ms/step   {middle:.3f} ({low:.3f}-{high:.3f})   "
            f"cpu {row['cpu_ratio'][1]:.3f}   {kept} {row['limit']}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")
    print(f"\nwritten to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
