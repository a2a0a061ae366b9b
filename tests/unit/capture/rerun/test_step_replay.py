"""The replay of a bad step computes what the step computed, and leaves nothing different.

Each loop is trained unwatched and watched; its fourth step overflows and is replayed. The gain that makes it overflow
is a power of two, so that the loss keeps all its bits and a replay that computes something else is found out.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampscope.trace.schema import Phase, ReplayStatus, Source
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import (
    BATCH,
    POISONED,
    WIDTH,
    Forward,
    here,
    make_scaler,
    mlp,
    mse,
    poison,
    train,
)
from tests.support.training.small_models import Square, TwoLayers
from tests.support.training.step_traces import Trace
from tests.support.training.twin_runs import Loop, train_both

EXACT: dict[str, Loop] = {}


def exact(loop: Loop) -> Loop:
    """Registers a loop whose replay has to be exact."""
    EXACT[loop.__name__] = loop
    return loop


def exact_loss(forward: Forward) -> Forward:
    """Registers the recipe's loop with this loss code around a small network."""
    EXACT[forward.__name__] = lambda watch: train(watch, mlp(), forward)
    return forward


def exact_model(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Registers the recipe's loop with this model."""
    EXACT[f"model_{make.__name__}"] = lambda watch: train(watch, make())
    return make


# -- what belongs to every training ----------------------------------------------------------------------------------


@exact
def plain(watch: Callable[..., object]) -> Any:
    return train(watch, mlp())


@exact_model
def dropout_and_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


@exact_model
def transformer_with_dropout() -> nn.Module:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.view(2, 2, WIDTH)).reshape(BATCH, WIDTH)

    return Rows()


@exact_model
def lstm_and_gru() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
            self.gru = nn.GRU(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(here(), enabled=False):  # the CPU has no half-precision LSTM
                out, _ = self.gru(self.lstm(x.view(2, 2, WIDTH))[0])
            return out.reshape(BATCH, WIDTH).half()

    return Recurrent()


@exact_model
def tied_weights() -> nn.Module:
    net = TwoLayers()
    net.second.weight = net.first.weight
    return net


@exact_model
def frozen_parameters() -> nn.Module:
    net = TwoLayers()
    net.first.requires_grad_(False)
    return net


@exact_model
def parametrized_weights() -> nn.Module:
    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), spectral_norm(nn.Linear(WIDTH, WIDTH)))


@exact
def accumulated_micro_batches(watch: Callable[..., object]) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    losses = []
    for step in range(5):
        for _ in range(3):
            with torch.autocast(here(), dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) / 3
            poison(step, scaler.scale(loss)).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    return [model, optimizer, scaler, losses]


def stepping(backward: Callable[[nn.Module, Any, int], list[Tensor]]) -> Loop:
    """The recipe's loop with another way to go backward."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            losses += backward(model, scaler, step)
            scaler.step(optimizer)
            scaler.update()
        return [model, scaler, [loss.detach() for loss in losses]]

    EXACT[backward.__name__] = loop
    return loop


def one_loss(model: nn.Module) -> Tensor:
    with torch.autocast(here(), dtype=torch.float16):
        return mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))


def two_losses(model: nn.Module) -> list[Tensor]:
    with torch.autocast(here(), dtype=torch.float16):
        out = model(torch.randn(BATCH, WIDTH))
        return [F.mse_loss(out, torch.randn(BATCH, WIDTH)), out.float().abs().mean()]


@stepping
def two_losses_and_a_retained_graph(model: nn.Module, scaler: Any, step: int) -> list[Tensor]:
    one, other = two_losses(model)
    poison(step, scaler.scale(one)).backward(retain_graph=True)
    scaler.scale(other).backward()
    return [one, other]


@stepping
def losses_scaled_as_a_list(model: nn.Module, scaler: Any, step: int) -> list[Tensor]:
    losses = two_losses(model)
    torch.autograd.backward([poison(step, scaled) for scaled in scaler.scale(losses)])
    return losses


@stepping
def backward_with_keywords(model: nn.Module, scaler: Any, step: int) -> list[Tensor]:
    loss = one_loss(model)
    torch.autograd.backward(tensors=[poison(step, scaler.scale(loss))])
    return [loss]


@stepping
def backward_of_a_tensor_with_its_gradient(model: nn.Module, scaler: Any, step: int) -> list[Tensor]:
    with torch.autocast(here(), dtype=torch.float16):
        loss = F.mse_loss(model(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, WIDTH), reduction="none")
    poison(step, scaler.scale(loss)).backward(gradient=torch.full_like(loss, 0.5))
    return [loss]


@stepping
def backward_into_chosen_leaves(model: nn.Module, scaler: Any, step: int) -> list[Tensor]:
    loss = one_loss(model)
    poison(step, scaler.scale(loss)).backward(inputs=list(model.parameters())[:2])
    return [loss]


# -- hand-written loss code ------------------------------------------------------------------------------------------


@exact_loss
def a_loss_summed_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, loss = model(x), torch.zeros(())
    for row in range(BATCH):
        loss += F.mse_loss(out[row], y[row])
    mask = torch.ones_like(out)
    mask[0, :2] = 0
    mask[1].fill_(0.5)
    loss += (out * mask).abs().mean()
    return loss


@exact_loss
def items_set_in_the_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).float().clone()
    out[:, 0] = 0.0
    out[out > 0.5] = 1.0
    out[1:3] *= 2
    return (out - y).pow(2).mean()


@exact_loss
def a_view_taken_before_its_base_is_written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).float() * 1.0
    part = out[:, :4]
    out.mul_(3.0)
    return (part - y[:, :4]).pow(2).mean()


@exact_loss
def a_row_of_a_constant_that_is_written_later(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, weights = model(x), torch.ones(BATCH, WIDTH)
    row = weights[0]
    weights.mul_(2.0)
    return (out * row).float().pow(2).mean()


@exact_loss
def rows_of_the_output_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([row.float().pow(2).mean() for row in model(x)]).sum()


@exact_loss
def a_result_written_into_given_memory(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, room = model(x).float(), torch.empty(BATCH, WIDTH)
    torch.mul(y, 2, out=room)
    return F.mse_loss(out, room)


@exact_loss
def named_results(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    top = torch.max(model(x).float(), dim=1)
    return top.values.mean() + top[0].sum()


@exact_loss
def labels_to_ignore(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    labels = y.argmax(1)
    labels[0] = -100
    return F.cross_entropy(model(x), labels, label_smoothing=0.1)


@exact_loss
def weights_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse(model, x, y) + 1e-3 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


@exact_loss
def data_of_the_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    target = out.data.float()
    target += y
    return F.mse_loss(out.float(), target * 0.5)


@exact_loss
def data_assigned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).float() * 1.0
    out.data = out.data * 2
    return F.mse_loss(out, y)


@exact_loss
def spectra(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.fft.rfft(model(x).float()).abs().pow(2).mean()


@exact_loss
def an_island_in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    with torch.autocast(here(), enabled=False):
        loss = ((out.float() - y) @ torch.ones(WIDTH, 1)).pow(2).mean()
    return loss + (out @ out.t()).mean()


@exact_loss
def branches_on_a_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    while out.float().abs().max() > 0.1:
        out = out / 2
    return F.mse_loss(out, y)


@exact_loss
def a_scalar_taken_to_python(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.mse_loss(out, y) / (1.0 + abs(out.detach().float().mean().item()))


@exact_loss
def through_numpy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    weights = torch.from_numpy(np.clip(out.detach().float().cpu().numpy(), -1, 1)).to(out.device)
    return ((out.float() - y) * weights).pow(2).mean()


@exact_loss
def random_ops_of_every_kind(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = F.dropout(model(x), 0.2) + F.gumbel_softmax(y, dim=-1)
    noise = torch.randn_like(y) + torch.rand(BATCH, 1) + torch.normal(0.0, 1.0, (WIDTH,), device=here())
    factor = torch.empty(WIDTH).uniform_() * torch.bernoulli(torch.full((WIDTH,), 0.5)) * torch.randint(1, 5, (WIDTH,))
    return ((out - noise)[torch.randperm(BATCH)] * factor).float().pow(2).mean()


@exact
def a_generator_of_the_loops_own(watch: Callable[..., object]) -> Any:
    generator = torch.Generator(here()).manual_seed(5)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.mse_loss(out, y + torch.randn(BATCH, WIDTH, generator=generator))

    return train(watch, mlp(), forward, keep=generator)


@exact_loss
def a_hook_on_the_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).float()
    out.register_hook(lambda gradient: gradient * 3)
    return F.mse_loss(out, y)


# -- the model is called more than once, or in parts -----------------------------------------------------------------


@exact_loss
def siamese_calls_share_one_cast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), model(y))


def _trains_after_no_grad() -> bool:
    layer = nn.Linear(1, 1)
    with torch.autocast(here(), dtype=torch.float16):
        with torch.no_grad():
            layer(torch.ones(1, 1))
        return layer(torch.ones(1, 1)).requires_grad


@exact_loss
def an_evaluation_inside_the_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if not _trains_after_no_grad():
        pytest.skip("this torch goes on with the weights that autocast cast under no_grad, watched or not")
    model.eval()
    with torch.no_grad():
        target = model(y)
    model.train()
    return F.mse_loss(model(x), target.float())


@exact_loss
def a_training_step_in_eval_mode(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    out = model(x)
    model.train()
    return F.mse_loss(out, y)


@exact
def submodules_called_by_the_loop(watch: Callable[..., object]) -> Any:
    parts = nn.ModuleDict({"encoder": mlp(), "head": nn.Linear(WIDTH, WIDTH)})
    return train(watch, parts, lambda _, x, y: F.mse_loss(parts["head"](F.gelu(parts["encoder"](x))), y))


@exact
def a_method_of_the_model(watch: Callable[..., object]) -> Any:
    class WithLoss(TwoLayers):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self(x), y) + self.first(x).float().mean()

    return train(watch, WithLoss(), lambda model, x, y: model.loss(x, y))


@exact
def forward_called_directly(watch: Callable[..., object]) -> Any:
    return train(watch, mlp(), lambda model, x, y: F.mse_loss(model.forward(x), y))


@exact
def the_loss_inside_the_model(watch: Callable[..., object]) -> Any:
    class WithLoss(TwoLayers):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = super().forward(x)
            return F.mse_loss(hidden, y), hidden

    return train(watch, WithLoss(), lambda model, x, y: model(x, y)[0])


@exact
def a_criterion_with_parameters_and_statistics(watch: Callable[..., object]) -> Any:
    criterion = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = mlp()
    parameters = [*model.parameters(), *criterion.parameters()]
    loss = lambda model, x, y: F.mse_loss(criterion(model(x)), y)  # noqa: E731  # one use
    return train(watch, model, loss, parameters=parameters, keep=criterion)


# -- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    extra: Any = None


Named = collections.namedtuple("Named", "logits extra")


class Plain:
    def __init__(self, logits: Tensor, extra: Any = None) -> None:
        self.logits, self.extra = logits, extra


def _register_output(kind: type) -> None:
    class Returning(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            hidden = super().forward(x)
            return kind(logits=hidden, extra=(hidden, [{"twice": hidden * 2}]))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.mse_loss(out.logits, y) + out.extra[1][0]["twice"].float().mean()

    class Taking(TwoLayers):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.logits) + batch.extra["target"]

    def fed_back(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(kind(model(kind(x, {"target": y})), {"target": y})), y)

    EXACT[f"output_{kind.__name__}"] = lambda watch: train(watch, Returning(), loss)
    EXACT[f"input_{kind.__name__}"] = lambda watch: train(watch, Taking(), fed_back)


for _kind in (Output, Slotted, Frozen, Named, Plain):
    _register_output(_kind)


@exact
def dicts_and_keywords(watch: Callable[..., object]) -> Any:
    class Mapped(TwoLayers):
        def forward(self, batch: dict[str, Any], *, scale: float = 1.0, extra: Any = None) -> dict[str, Any]:
            hidden = super().forward(batch["x"]) * scale
            return collections.OrderedDict(logits=hidden, rest=[hidden.float(), {"sum": hidden + extra}])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model({"x": x, "meta": "text"}, scale=2.0, extra=y)
        return F.mse_loss(out["logits"], y) + out["rest"][1]["sum"].float().mean()

    return train(watch, Mapped(), loss)


@exact
def a_deque_of_earlier_outputs(watch: Callable[..., object]) -> Any:
    class Last(TwoLayers):
        def forward(self, seen: collections.deque[Tensor]) -> Tensor:
            return super().forward(seen[-1])

    return train(watch, Last(), lambda m, x, y: F.mse_loss(m(collections.deque([x, m(collections.deque([x]))])), y))


LENGTHS = torch.tensor([2, 1])  # on the host, wherever the sequences are


@exact
def a_packed_sequence(watch: Callable[..., object]) -> Any:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH)

        def forward(self, packed: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
            with torch.autocast(here(), enabled=False):
                return self.lstm(packed)[0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 2, WIDTH), LENGTHS, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed))
        return F.mse_loss(out.half(), y.view(2, 2, WIDTH))

    return train(watch, Packed(), loss)


@exact
def a_hugging_face_output_and_batch(watch: Callable[..., object]) -> Any:
    transformers = pytest.importorskip("transformers")

    class Encoder(TwoLayers):
        def forward(self, batch: Any, y: Tensor) -> Any:
            hidden = super().forward(batch["x"]) + batch["x"]
            outputs = transformers.modeling_outputs.BaseModelOutputWithPooling
            return outputs(last_hidden_state=hidden, hidden_states=(hidden, hidden * 2))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(transformers.BatchEncoding({"x": x}), y=y)
        return F.mse_loss(out.last_hidden_state, y) + out["hidden_states"][1].float().mean() + out[0].float().mean()

    return train(watch, Encoder(), loss)


@exact
def inputs_that_gather_gradients(watch: Callable[..., object]) -> Any:
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept.append(x.requires_grad_())
        return mse(model, x, y)

    state = train(watch, mlp(), loss, keep=kept)
    return state | {"gradients": [tensor.grad for tensor in kept]}


@exact
def one_of_several_inputs_handed_back(watch: Callable[..., object]) -> Any:
    class Passing(TwoLayers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, super().forward(x)

    return train(watch, Passing(), lambda m, x, y: F.mse_loss(torch.add(*m(x)), y))


# -- gradients of gradients ------------------------------------------------------------------------------------------


@exact_loss
def a_gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    between = (0.5 * x + 0.5 * y).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(between).float().sum(), between, create_graph=True)
    return mse(model, x, y) + (slope.norm(dim=1) - 1).pow(2).mean()


@exact_loss
def a_gradient_penalty_with_the_flag_assigned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    between = (0.5 * x + 0.5 * y).detach()
    between.requires_grad = True
    (slope,) = torch.autograd.grad(model(between).float().sum(), between, create_graph=True)
    return loss + (slope.norm(dim=1) - 1).pow(2).mean()


@exact
def gradients_of_the_weights_in_the_loss(watch: Callable[..., object]) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first = mse(model, x, y)
        slopes = torch.autograd.grad(first, list(model.parameters()), create_graph=True)
        return first + 0.01 * torch.stack([slope.pow(2).sum() for slope in slopes]).sum()

    return train(watch, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), loss)


@exact_model
def forces_from_an_energy() -> nn.Module:
    class Forces(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            places = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(places).float().pow(2).sum(), places, create_graph=True)
            return forces

    return Forces()


# -- code that runs again, or that autograd does not know ------------------------------------------------------------


@exact_model
def a_custom_function_in_the_model() -> nn.Module:
    class Squared(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(super().forward(x))

    return Squared()


def _checkpointed(*, reentrant: bool) -> nn.Module:
    class Checkpointed(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(lambda t: self.second(F.dropout(t, 0.1)), F.relu(hidden), use_reentrant=reentrant)

    return Checkpointed()


@exact_model
def checkpointed() -> nn.Module:
    return _checkpointed(reentrant=False)


@exact_model
def checkpointed_by_the_reentrant_variant() -> nn.Module:
    return _checkpointed(reentrant=True)


@exact_loss
def checkpoint_around_the_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(checkpoint(model, x, use_reentrant=False), y)


@exact_loss
def checkpoint_around_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda out: F.mse_loss(out, y) * 2, model(x), use_reentrant=False)


@exact_model
def an_island_without_autocast() -> nn.Module:
    class Island(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            with torch.autocast(here(), enabled=False):
                return self.second(hidden.float())

    return Island()


@exact_model
def mapped_over_the_batch() -> nn.Module:
    class Mapped(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: self.second(torch.tanh(self.first(row))))(x)

    return Mapped()


# -- forward changes something ---------------------------------------------------------------------------------------


@exact_model
def python_and_numpy_randomness() -> nn.Module:
    class Random(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.random() * np.random.rand()

    return Random()


@exact_model
def counters_and_lists() -> nn.Module:
    class Counting(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen, self.by_call = 0, list[Any](), dict[Any, Any]()
            self.recent: collections.deque[int] = collections.deque(maxlen=3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.by_call[self.calls] = True
            self.recent.append(self.calls)
            return super().forward(x) * (1 + 0.1 * self.calls)

    return Counting()


@exact_model
def a_buffer_updated_and_another_rebound() -> nn.Module:
    class Averaging(TwoLayers):
        mean: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(WIDTH))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean = self.mean * 0.9 + 0.1 * self.count
            return super().forward(x) * self.mean

    return Averaging()


@exact_model
def a_large_buffer() -> nn.Module:
    class Table(TwoLayers):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(600, 600))

        def forward(self, x: Tensor) -> Tensor:
            self.table.mul_(0.9).add_(0.5)
            return super().forward(x) * self.table[0, :WIDTH]

    return Table()


@exact_model
def a_tensor_that_is_no_buffer() -> nn.Module:
    class Running(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.running, self.last = torch.ones(()), torch.zeros(BATCH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x)
            self.running.mul_(0.9).add_(0.5)
            out = hidden * self.running + self.last
            self.last = hidden.detach().float()
            return out

    return Running()


@exact_model
def a_codebook_in_a_frozen_parameter() -> nn.Module:
    class Codebook(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.code.mul_(0.9).add_(0.5)
            return super().forward(x) * self.code

    return Codebook()


@exact
def a_hidden_state_between_steps(watch: Callable[..., object]) -> Any:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH)
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(here(), enabled=False):
                out, hidden = self.gru(x.view(2, 2, WIDTH), self.hidden)
            self.hidden = hidden.detach()
            return out.reshape(BATCH, WIDTH).half()

    return train(watch, Stateful())


# -- the user's hooks ------------------------------------------------------------------------------------------------


@exact_model
def hooks_that_change_values() -> nn.Module:
    def doubled(module: nn.Module, inner: Any, outer: Any) -> Any:
        return (inner[0] * 2,)

    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model[2].register_full_backward_hook(doubled)
    return model


@exact
def hooks_that_take_notes(watch: Callable[..., object]) -> Any:
    notes: list[float] = []

    def take_note(module: nn.Module, inner: Any, outer: Any) -> None:
        notes.append(outer[0].float().sum().item())

    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: notes.append(out.float().sum().item()))
    model[2].register_full_backward_hook(take_note)
    return train(watch, model, keep=notes)


@exact
def hooks_on_parameters(watch: Callable[..., object]) -> Any:
    notes: list[float] = []
    model = mlp()
    linear(model, "0").weight.register_post_accumulate_grad_hook(lambda weight: notes.append(1.0))
    linear(model, "2").weight.register_hook(lambda gradient: notes.append(2.0))
    return train(watch, model, keep=notes)


@exact_model
def a_gradient_hook_on_an_activation() -> nn.Module:
    class Hooked(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda gradient: gradient * 2)
            return self.second(hidden)

    return Hooked()


@exact
def clipping_that_spreads_to_all_gradients(watch: Callable[..., object]) -> Any:
    """Only the first layer's gradients overflow; clipping by their norm makes NaNs of the others'."""
    model = TwoLayers()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    for step in range(POISONED + 2):
        optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            hidden = model.first(torch.randn(BATCH, WIDTH))
            hidden.register_hook(partial(torch.mul, torch.tensor(torch.inf if step == POISONED else 1.0)))
            loss = model.second(F.relu(hidden)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler]


# -- parameters that the model does not list -------------------------------------------------------------------------


@exact
def a_parameter_in_a_closure(watch: Callable[..., object]) -> Any:
    extra = nn.Parameter(torch.ones(WIDTH))

    class Outer(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * extra

    model = Outer()
    state = train(watch, model, parameters=[*model.parameters(), extra], keep=extra)
    return state | {"gradient": extra.grad}


@exact
def a_parameter_in_a_list(watch: Callable[..., object]) -> Any:
    class Listed(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.extras = [torch.ones(WIDTH, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.extras[0]

    model = Listed()
    state = train(watch, model, parameters=[*model.parameters(), *model.extras])
    return state | {"gradient": model.extras[0].grad}


# -- the test --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_the_replay_is_exact_and_changes_nothing(name: str, device: str, run_folder: Path) -> None:
    if device != "cpu" and name in RECURRENT:
        pytest.skip("the fake accelerator has no recurrent cells")
    watched = train_both(EXACT[name], run_folder, every=1)
    assert watched.replay_of(POISONED) == (ReplayStatus.EXACT, "")
    assert watched.warnings == []
    if name not in VARYING:
        live, replayed = Trace(watched.run, POISONED - 1), Trace(watched.run, POISONED, Source.REPLAY)
        as_compared = in_any_order if device != "cpu" and name in TWICE_BACKWARD else list
        assert as_compared(replayed.calculation()) == as_compared(live.calculation())


def in_any_order(calculation: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A calculation without its order, and without what depends on it: which of two gradients is added to the other."""
    return sorted(each[:2] if each[:2] == ("aten.add.Tensor", Phase.BACKWARD) else each for each in calculation)


#: Loops whose code does not run the same ops in every step, or runs some that no gradient depends on.
VARYING = {
    "a_criterion_with_parameters_and_statistics",  # its statistics feed no gradient
    "model_checkpointed_by_the_reentrant_variant",  # the real step adds to gradients that were set to zero
    "accumulated_micro_batches",  # adds to gradients that were set to zero
    "a_row_of_a_constant_that_is_written_later",  # its value is kept, not how it came about
    "branches_on_a_value",
    "a_scalar_taken_to_python",
    "through_numpy",
    "checkpoint_around_the_model",
    "checkpoint_around_the_loss",
    "a_reentrant_checkpoint_around_the_model",
    "an_evaluation_inside_the_step",
    "a_packed_sequence",
    "a_gradient_hook_on_an_activation",
}
#: Loops whose backward computes a gradient of gradients: a thread of the device evaluates its own nodes in another
#: order than a replay, for it numbers them from 0.
TWICE_BACKWARD = {
    "a_gradient_penalty",
    "a_gradient_penalty_with_the_flag_assigned",
    "gradients_of_the_weights_in_the_loss",
    "model_forces_from_an_energy",
}
RECURRENT = {"model_lstm_and_gru", "a_packed_sequence", "a_hidden_state_between_steps"}
