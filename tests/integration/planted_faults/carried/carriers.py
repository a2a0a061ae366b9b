"""Small loops that carry tensors of their own from step to step, each kind poisoned once, or healthy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training.small_loop import here

BATCH, WIDTH = 8, 6
#: The step that leaves something behind which is not finite, the first that reads it, and how many there are.
BAD, READ, STEPS = 4, 7, 10
HUGE = 1e7  #: finite in float32 only

Watch = Callable[[nn.Module, Any], object]


@dataclass(frozen=True)
class Carrier:
    """A kind of loop: ``before`` runs at its top, ``loss`` in the step, ``after`` at its end."""

    state: Callable[[], dict[str, Any]]
    loss: Callable[[dict[str, Any], Tensor, Tensor, int], Tensor]
    before: Callable[[dict[str, Any], Tensor, bool], object] = lambda *_: None
    after: Callable[[dict[str, Any], Tensor, bool], object] = lambda *_: None


def train(carrier: Carrier, watch: Watch, *, poisoned: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(here(), init_scale=64.0)
    watch(model, scaler)
    state = carrier.state()
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        carrier.before(state, x, poisoned and step == BAD)
        optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            out = model(x).float()
            loss = out.pow(2).mean() + carrier.loss(state, out, x, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            carrier.after(state, out.detach(), poisoned and step == BAD)


def _size(bad: bool) -> float:
    return HUGE if bad else 1.0


def _enqueue(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    keys = F.normalize(out, dim=-1) * _size(bad)
    state["queue"] = torch.cat((state["queue"][BATCH:], keys.half()))


def _against_queue(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    if step < READ:
        return out.new_zeros(())
    return (out @ state["queue"].float().T).softmax(-1).square().mean()


def _write_row(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    state["rows"].narrow(0, state["at"], 1).copy_(out[:1] * _size(bad))
    state["at"] = (state["at"] + 1) % len(state["rows"])


def _against_rows(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    rows = state["rows"].float() if step >= READ else torch.ones(1, WIDTH)
    return (out - rows.mean(0)).abs().mean()


def _follow_teacher(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    state["target"].mul_(0.9).add_(out.mean(0).half() * 0.1 + 4e4 * bad)
    state["target"].mul_(1 + bad)


def _against_target(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return F.smooth_l1_loss(out, state["target"].float().expand_as(out)) if step >= READ else out.mean()


def _teacher() -> dict[str, Any]:
    return {"teacher": nn.Linear(WIDTH, WIDTH).half().requires_grad_(False)}


def _teach(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    for weight in state["teacher"].parameters():
        weight.mul_(0.9).add_(out.mean().half() * 0.1 + 4e4 * bad)
        weight.mul_(bad + 1)


def _like_teacher(state: dict[str, Any], out: Tensor, x: Tensor, step: int) -> Tensor:
    """The teacher is asked after the model, within the step."""
    return F.mse_loss(out, state["teacher"](x.half()).float()) if step >= READ else out.mean()


def _normalise(state: dict[str, Any], x: Tensor, bad: bool) -> None:
    reward = x.sum(-1) * (2000.0 if bad else 1.0)
    state["square"] = 0.5 * state["square"] + reward.half().square().mean()
    state["reward"] = reward / (1 + state["square"].float().sqrt())


def _weighted(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out.mean(-1) * state["reward"]).mean()


def _remember(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    state["hidden"] = 0.5 * state["hidden"] + (out[:, 0] * _size(bad)).half()


def _continue(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out[:, 0] * state["hidden"]).float().mean() if step >= READ else out.mean()


def _cache(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    rows = (out * _size(bad)).half()
    state["cache"][len(state["cache"])] = rows[0], rows[1]


def _against_cache(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    past = torch.stack(state["cache"][step - READ + BAD]) if step >= READ else torch.zeros(2, WIDTH)
    return (out[:2] - past).square().mean()


def _group(state: dict[str, Any]) -> range:
    """The documents of a step: the same come again every third."""
    start = BATCH * (state["at"] % (READ - BAD))
    return range(start, start + BATCH)


def _loud(out: Tensor, bad: bool) -> Tensor:
    """One row, and not the last, is too large for float16."""
    return out * torch.where(torch.arange(BATCH) == 1, _size(bad), 1.0).unsqueeze(1)


def _store(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    for document, row in zip(_group(state), _loud(out, bad), strict=True):
        state["store"][document] = row.half()
    state["at"] += 1


def _store_in_place(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    for document, row in zip(_group(state), _loud(out, bad), strict=True):
        state["store"].setdefault(document, torch.zeros(WIDTH).half()).copy_(row)
    state["at"] += 1


def _recall(state: dict[str, Any], _: Tensor, bad: bool) -> None:
    nothing = torch.zeros(WIDTH).half()
    state["recalled"] = torch.stack([state["store"].get(document, nothing) for document in _group(state)])


def _with_recalled(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out * state["recalled"].float()).mean()


def _sum_up(state: dict[str, Any], out: Tensor, bad: bool) -> None:
    state["sums"] += out.abs().sum(0) * _size(bad)
    state["at"] += 1
    if state["at"] % 3 == 0:
        state["past"].append(state["sums"] / 3)
        state["sums"] = torch.zeros_like(state["sums"])
    if state["at"] == 9:
        state["weights"] = (state["past"][-2] / state["past"][-1]).float().softmax(0)


def _by_past(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out * state["weights"]).mean()


def _sums() -> dict[str, Any]:
    return {"sums": torch.zeros(WIDTH).half(), "past": [], "at": 0, "weights": torch.ones(WIDTH)}


CARRIERS = {
    "cache": Carrier(lambda: {"cache": {}}, _against_cache, after=_cache),
    "queue": Carrier(lambda: {"queue": torch.zeros(3 * BATCH, WIDTH).half()}, _against_queue, after=_enqueue),
    "bank": Carrier(lambda: {"rows": torch.zeros(16, WIDTH).half(), "at": 0}, _against_rows, after=_write_row),
    "target": Carrier(lambda: {"target": torch.zeros(WIDTH).half()}, _against_target, after=_follow_teacher),
    "teacher": Carrier(_teacher, _like_teacher, after=_teach),
    "normaliser": Carrier(lambda: {"square": torch.zeros(()).half()}, _weighted, before=_normalise),
    "documents": Carrier(lambda: {"store": {}, "at": 0}, _with_recalled, before=_recall, after=_store),
    "slots of documents": Carrier(
        lambda: {"store": {}, "at": 0}, _with_recalled, before=_recall, after=_store_in_place
    ),
    "sums of epochs": Carrier(_sums, _by_past, after=_sum_up),
    "hidden": Carrier(lambda: {"hidden": torch.zeros(BATCH).half()}, _continue, after=_remember),
}


# -- what is made of it at the top of the step that reads it ------------------------------------------------------


def _visit(state: dict[str, Any], _: Tensor, bad: bool) -> None:
    state["priority"] += 60.0 if bad else 0.5


def _weigh(state: dict[str, Any], _: Tensor, __: bool) -> None:
    share = state["priority"] / state["priority"].sum()
    state["weight"] = (len(share) * share[:BATCH].float()) ** -0.5


def _by_weight(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (state["weight"] / state["weight"].max() * out.mean(-1)).mean()


PRIORITIES = Carrier(lambda: {"priority": torch.full((512,), 100.0).half()}, _by_weight, before=_weigh, after=_visit)


# -- oddities that a loop may carry and means to -------------------------------------------------------------------


def _best(state: dict[str, Any], out: Tensor, _: bool) -> None:
    state["best"] = torch.minimum(state["best"], out.abs().mean())


def _below_best(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out.mean() - state["best"].clamp(max=1.0)).square()


def _fill_slot(state: dict[str, Any], out: Tensor, _: bool) -> None:
    state["slots"][state["at"]] = out.mean(0).half()
    state["at"] += 1
    if state["at"] == 4:
        state["slots"].fill_(torch.nan)  # nothing there again
        state["at"] = 0


def _near_slots(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    there = ~state["slots"].isnan()
    return torch.where(there, out.mean(0) - state["slots"].float(), 0.0).square().mean()


def _mask(state: dict[str, Any], out: Tensor, _: bool) -> None:
    state["mask"].zero_()
    state["mask"][int(out.argmax()) % WIDTH] = -torch.inf


def _masked(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out + state["mask"]).softmax(-1).square().mean()


def _count_up(state: dict[str, Any], out: Tensor, _: bool) -> None:
    state["total"] = state["total"] + (out * 2e4).half().abs().sum()  # a metric that nobody trains on


def _keep_masked(state: dict[str, Any], out: Tensor, _: bool) -> None:
    state["scores"].append(out.masked_fill(out < 0, -torch.inf))


def _late_softmax(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    past = state["scores"][step - READ] if step >= READ else torch.zeros(BATCH, WIDTH)
    return (out + past.clamp(min=-1e4).softmax(-1)).square().mean()


def _store_masks(state: dict[str, Any], out: Tensor, _: bool) -> None:
    for document, row in zip(_group(state), out, strict=True):
        state["store"][document] = row.half().masked_fill(row < row.median(), -torch.inf)
    state["at"] += 1


def _under_masks(state: dict[str, Any], out: Tensor, _: Tensor, step: int) -> Tensor:
    return (out * state["recalled"].float().exp()).mean()


def _overflow_and_mend(state: dict[str, Any], out: Tensor, _: bool) -> None:
    """A value that is too large is there for a step that does not read it, and is written over."""
    state["at"] += 1
    state["rows"].copy_(out * _size(state["at"] == BAD))


HARMLESS = {
    "masks of documents": Carrier(lambda: {"store": {}, "at": 0}, _under_masks, before=_recall, after=_store_masks),
    "mended in time": Carrier(
        lambda: {"rows": torch.zeros(BATCH, WIDTH).half(), "at": 0},
        lambda state, out, _, step: (out - (state["rows"].float() if step >= READ else 0.0)).square().mean(),
        after=_overflow_and_mend,
    ),
    "masked scores": Carrier(lambda: {"scores": []}, _late_softmax, after=_keep_masked),
    "best so far": Carrier(lambda: {"best": torch.tensor(torch.inf)}, _below_best, after=_best),
    "empty slots": Carrier(
        lambda: {"slots": torch.full((4, WIDTH), torch.nan).half(), "at": 0}, _near_slots, after=_fill_slot
    ),
    "mask": Carrier(lambda: {"mask": torch.zeros(WIDTH)}, _masked, after=_mask),
    "metric": Carrier(lambda: {"total": torch.zeros(()).half()}, lambda *_: torch.zeros(()), after=_count_up),
}
