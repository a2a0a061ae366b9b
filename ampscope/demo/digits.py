"""Trains a small convolutional network on images of digits, in fp16: a healthy run, interrupted and resumed.

The counterpart of ``ampscope.demo.gpt``: the same recipe of autocast and ``GradScaler`` with default settings, saved
and restored together with the scaler's state, as it should be.

Run it with ``ampscope demo --story digits``, or by itself: ``python -m ampscope.demo.digits FOLDER``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.demo.progress import progress

EPOCHS = 4
BATCH = 64
LEARNING_RATE = 1e-3


class ConvNet(nn.Module):
    """Two convolutions and a classifier for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))


def read_digits() -> tuple[Tensor, Tensor]:
    """The images, with pixels from 0 to 1, and the digit on each."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def train(folder: Path, checkpoint: Path, *, title: str) -> None:
    """Trains for some epochs, starting from ``checkpoint`` if there is one, and saves it again."""
    images, labels = read_digits()
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu")

    with ampscope.watch(model, scaler, dir=folder):
        if checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
        batches = [batch for _ in range(EPOCHS) for batch in torch.randperm(len(images)).split(BATCH)]
        with progress(title, len(batches)) as tell:
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(images[batch]), labels[batch])
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                tell(loss.item(), scaler.get_scale())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, checkpoint)


def main() -> None:
    """Reads the command line and trains, twice: the second time from where the first stopped."""
    parser = argparse.ArgumentParser(description="Train a small network on digits in fp16, and resume it once.")
    parser.add_argument("folder", type=Path, help="where to record the run")
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the images are so small that a second thread only waits
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Path(place, "checkpoint.pt")
        train(folder, checkpoint, title="training on digits in fp16")
        train(folder, checkpoint, title="resuming from the checkpoint")


if __name__ == "__main__":
    main()
