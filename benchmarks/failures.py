"""A training that fails on demand: steps whose gradients overflow in half precision, and would not in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from workload import Place, Size, Training

#: Steps without failure after which the scale grows; failures twice as far apart leave it where it is.
GROWTH_INTERVAL = 2
HARMLESS = 2.0
#: Rounds to 1 in half precision, to the root of zero then, whose slope is infinite.
TRIPS = 1.0002


class Gate(nn.Module):
    """The root of what a number is above one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(nn.functional.linear(x, self.weight) - 1)


class Gated(nn.Module):
    """A model with gates beside it, each of which can be tripped by itself."""

    def __init__(self, model: nn.Module, gates: int) -> None:
        super().__init__()
        self.model = model
        self.gates = nn.ModuleList(Gate() for _ in range(gates))

    def forward(self, frames: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
        penalties = [gate(margins[:, k : k + 1]) for k, gate in enumerate(self.gates)]
        return self.model(frames), torch.cat(penalties, 1).mean()


class Failing(Training):
    """The benchmark's training with a gate for each cause that a failure may have."""

    def __init__(self, size: Size, place: Place, gates: int = 8) -> None:
        super().__init__(size, place)
        self.gates = gates
        gated = Gated(self.model, gates).to(place.device)
        self.model = gated
        self.optimizer.add_param_group({"params": list(gated.gates.parameters()), "lr": 0.0, "weight_decay": 0.0})
        self.scaler.set_growth_interval(GROWTH_INTERVAL)
        self.margins = torch.full((size.batch, gates), HARMLESS, device=place.device)

    def step(self, frames: Tensor | None = None, gate: int | None = None) -> None:
        """One optimizer step; tripping a gate makes its gradients non-finite in half precision."""
        margins = self.margins.clone()
        if gate is not None:
            margins[:, gate % self.gates] = TRIPS
        self.optimizer.zero_grad()
        with torch.autocast(self.place.device, dtype=self.place.dtype):
            logits, penalty = self.model(self.frames if frames is None else frames, margins)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten()) + 1e-3 * penalty
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
