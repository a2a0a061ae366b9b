"""A convolutional network on scikit-learn's bundled handwritten digits, with checkpoints to resume from.

Also a program, because a resume that matters happens in a new process::

    python -m tests.integration.loops.digits --run RUN --checkpoint FILE --epochs 2
    python -m tests.integration.loops.digits --run RUN --checkpoint FILE --epochs 4 --resume
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.integration.loops.trained import Trained, Watch, exact_state, seed_everything


class DigitsNet(nn.Module):
    """Three convolutions, two of them with BatchNorm, and a linear layer: 8x8 grey images to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def load_images(limit: int | None = None) -> tuple[Tensor, Tensor]:
    """The bundled digits: float images in 0..16 as they come, shape (N, 1, 8, 8), and int64 labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    return images[:limit], torch.tensor(digits.target)[:limit]


def train(
    watch: Watch | None = None,
    *,
    epochs: int = 2,
    batch_size: int = 64,
    samples: int | None = 512,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    restore_scaler: bool = True,
    watch_before_loading: bool = False,
) -> Trained:
    """Train up to ``epochs`` epochs in all, from ``checkpoint`` if ``resume``, and save it after each epoch.

    Batches depend on the epoch alone, so a resumed training is the same as one that was never interrupted. The loss
    is a sum, so its gradients are large and the scaler has to calibrate down before the first step is taken.
    """
    seed_everything(seed)
    images, labels = load_images(samples)
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    if watch is not None and watch_before_loading:
        watch(model, scaler)
    first_epoch = 0
    if resume and checkpoint is not None:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if restore_scaler:
            scaler.load_state_dict(state["scaler"])
        first_epoch = state["epoch"] + 1
    if watch is not None and not watch_before_loading:
        watch(model, scaler)

    losses: list[float] = []
    skipped: list[int] = []
    for epoch in range(first_epoch, epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                skipped.append(len(losses))
            losses.append(loss.item() / len(batch))
        if checkpoint is not None:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "epoch": epoch,
                },
                checkpoint,
            )
    return Trained(model, optimizer, scaler, losses, skipped)


def main() -> None:
    import ampscope

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of the watched run; not watched without it")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--forget-scaler", action="store_true")
    parser.add_argument("--watch-before-loading", action="store_true")
    parser.add_argument("--state", type=Path, help="JSON file for the exact state at the end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scopes = []
    run = train(
        (lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=args.run))) if args.run else None,
        epochs=args.epochs,
        checkpoint=args.checkpoint,
        resume=args.resume,
        restore_scaler=not args.forget_scaler,
        watch_before_loading=args.watch_before_loading,
    )
    for scope in scopes:
        scope.close()
    if args.state is not None:
        args.state.write_text(json.dumps({name: value.hex() for name, value in exact_state(run).items()}))


if __name__ == "__main__":
    main()
