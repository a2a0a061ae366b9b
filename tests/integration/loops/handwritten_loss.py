"""A classifier of handwritten digits whose loss is written by hand, as in a textbook: ``-sum(target * log(p))``.

On paper that is the cross-entropy. In half precision a probability below 3e-8 is zero; for a wrong class its term is
``0 * log(0)``, which is not 0 but NaN. So training goes well until the network has become sure of its answers, and the
better it gets, the more of its steps are skipped. ``F.cross_entropy`` knows no such trouble.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.integration.loops.digits import load_images
from tests.integration.loops.trained import Trained, Watch, seed_everything


class Classifier(nn.Module):
    """A network with one hidden layer that answers with probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.hidden(images.flatten(1)))
        return torch.softmax(self.out(hidden), dim=1)


def cross_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Mean over the images of the sum over the classes, as the formula has it."""
    targets = nn.functional.one_hot(labels, 10)
    return -(targets * torch.log(probabilities)).sum(1).mean()


def train(watch: Watch | None = None, *, epochs: int = 5, batch_size: int = 64, seed: int = 0) -> Trained:
    seed_everything(seed)
    images, labels = load_images()
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    if watch is not None:
        watch(model, scaler)
    losses: list[float] = []
    skipped: list[int] = []
    for _epoch in range(epochs):
        for batch in torch.randperm(len(images)).split(batch_size):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                probabilities = model(images[batch])
                loss = cross_entropy(probabilities, labels[batch])
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                skipped.append(len(losses))
            losses.append(loss.item())
    return Trained(model, optimizer, scaler, losses, skipped)
