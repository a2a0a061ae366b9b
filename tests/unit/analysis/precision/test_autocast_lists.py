"""The dtypes of a traced step are those that torch's documentation of autocast on the CPU says, and counted right.

https://docs.pytorch.org/docs/stable/amp.html, "CPU Op-Specific Behavior".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampscope
from ampscope.analysis.precision.precision import precision

WIDTH = 4
#: Of two square matrices of numbers between 0 and 1, and of one of ones.
Op = Callable[[Tensor, Tensor, Tensor], Tensor]


def _image(x: Tensor) -> Tensor:
    return x.reshape(1, 1, WIDTH, WIDTH)


def _volume(x: Tensor) -> Tensor:
    return x.reshape(1, 1, 1, WIDTH, WIDTH)


#: By documented name: it runs in the lower precision.
LOWER: dict[str, Op] = {
    "conv1d": lambda x, y, _: F.conv1d(x[None], y[:, :, None]),
    "conv2d": lambda x, y, _: F.conv2d(_image(x), _image(y)),
    "conv3d": lambda x, y, _: F.conv3d(_volume(x), _volume(y)),
    "conv_transpose2d": lambda x, y, _: F.conv_transpose2d(_image(x), _image(y)),
    "bmm": lambda x, y, _: torch.bmm(x[None], y[None]),
    "mm": lambda x, y, _: torch.mm(x, y),
    "baddbmm": lambda x, y, _: torch.baddbmm(x[None], x[None], y[None]),
    "addmm": lambda x, y, _: torch.addmm(x, x, y),
    "addbmm": lambda x, y, _: torch.addbmm(x, x[None], y[None]),
    "linear": lambda x, y, _: F.linear(x, y),
    "matmul": lambda x, y, _: x @ y,
    "scaled_dot_product_attention": lambda x, y, _: F.scaled_dot_product_attention(_image(x), _image(y), _image(y)),
}
#: Those that run in float32, whatever they are given.
FLOAT32: dict[str, Op] = {
    "avg_pool3d": lambda x, *_: F.avg_pool3d(_volume(x), (1, 2, 2)),
    "grid_sampler": lambda x, y, _: F.grid_sample(_image(x), y.reshape(1, 2, WIDTH, 2), align_corners=False),
    "prod": lambda x, *_: torch.prod(x),
    "trace": lambda x, *_: torch.trace(x),
    "cdist": lambda x, y, _: torch.cdist(x[None], y[None]),
    "max_pool3d": lambda x, *_: F.max_pool3d(_volume(x), (1, 2, 2)),
    "adaptive_avg_pool3d": lambda x, *_: F.adaptive_avg_pool3d(_volume(x), 1),
    "reflection_pad1d": lambda x, *_: F.pad(x, (1, 1), mode="reflect"),
    "replication_pad2d": lambda x, *_: F.pad(_image(x), (1, 1, 1, 1), mode="replicate"),
    "mse_loss": lambda x, y, _: F.mse_loss(x, y),
    "l1_loss": lambda x, y, _: F.l1_loss(x, y),
    "smooth_l1_loss": lambda x, y, _: F.smooth_l1_loss(x, y),
    "huber_loss": lambda x, y, _: F.huber_loss(x, y),
    "kl_div": lambda x, y, _: F.kl_div(x, y, reduction="batchmean"),
    "cosine_embedding_loss": lambda x, y, ones: F.cosine_embedding_loss(x, y, ones[0]),
    "nll_loss": lambda x, *_: F.nll_loss(x, torch.arange(WIDTH)),
    "cross_entropy_loss": lambda x, *_: F.cross_entropy(x, torch.arange(WIDTH)),
    "binary_cross_entropy": lambda x, y, _: F.binary_cross_entropy(x, y),
    "binary_cross_entropy_with_logits": lambda x, y, _: F.binary_cross_entropy_with_logits(x, y),
    "hinge_embedding_loss": lambda x, _, ones: F.hinge_embedding_loss(x, ones),
    "soft_margin_loss": lambda x, _, ones: F.soft_margin_loss(x, ones),
    "multilabel_margin_loss": lambda x, *_: F.multilabel_margin_loss(x, torch.zeros(WIDTH, WIDTH, dtype=torch.long)),
    "poisson_nll_loss": lambda x, y, _: F.poisson_nll_loss(x, y),
    "triplet_margin_loss": F.triplet_margin_loss,
    "inverse": lambda x, *_: torch.inverse(x),
    "quantile": lambda x, *_: torch.quantile(x, 0.5),
}
#: Those that take the widest of what they are given.
PROMOTE: dict[str, Op] = {
    "cat": lambda x, *_: torch.cat([x, x.float()]),
    "stack": lambda x, *_: torch.stack([x, x.float()]),
}


class Calling(nn.Module):
    """Calls one op within a module of its name."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *matrices: Tensor) -> Tensor:
        return self.op(*matrices)


class Called(nn.Module):
    """Calls each op of the first list with matrices in float32, of the others with some in the lower precision."""

    def __init__(self, *, without: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        ops = {name: op for name, op in (LOWER | FLOAT32 | PROMOTE).items() if name != without}
        self.weights = nn.ParameterList(torch.rand(WIDTH, WIDTH) for _ in ops)
        self.parts = nn.ModuleDict({name: Calling(op) for name, op in ops.items()})

    def forward(self) -> Tensor:
        means = []
        for (name, part), weight in zip(self.parts.items(), self.weights, strict=True):
            x = weight if name in LOWER else weight.bfloat16()
            means.append(part(x, 1 - x, torch.ones_like(x)).float().mean())
        return torch.stack(means).sum()


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Counts, by op, the dtype of the first floating result, or of the first floating operand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.ran: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        flat = [each for arg in args for each in (arg if isinstance(arg, (tuple, list)) else [arg])]
        floats = [x for x in (*results, *flat) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        computes = not (is_view or func is torch.ops.aten._to_copy.default or "aten.empty" in str(func))
        if floats and computes:
            self.ran[str(func), str(floats[0].dtype).removeprefix("torch.")] += 1
        return result


def _step(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model()
    loss.backward()


def _traced(model: Called, folder: Path) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with ampscope.watch(model, dir=folder, every=1, quiet=True):
        _step(model)
        optimizer.step()
    return folder


def test_an_op_runs_in_the_dtype_of_its_list(tmp_path: Path) -> None:
    model = Called()
    with ampscope.open_run(_traced(model, tmp_path / "run")) as run:
        rows = precision(run).modules
    ran = {row.name.removeprefix("parts."): {share.dtype for share in row.shares} for row in rows if row.name}
    assert ran == {name: {"bfloat16" if name in LOWER else "float32"} for name in model.parts}


def test_ops_and_dtypes_are_counted_as_a_mode_of_torchs_counts_them(tmp_path: Path) -> None:
    without = "prod"  # under any mode torch takes its gradient by another formula, so that this backward is not traced
    model = Called(without=without)
    with Counted() as counted:
        _step(model)
    with ampscope.open_run(_traced(Called(without=without), tmp_path / "run")) as run:
        table = {(row.name, share.dtype): share.ops for row in precision(run).ops for share in row.shares}
    assert sum(table.values()) > 200
    assert table == dict(counted.ran)
