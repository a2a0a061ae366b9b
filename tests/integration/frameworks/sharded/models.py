"""The small model that several ranks train, and the ways in which it is distributed over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: The hidden layer divides by two and three, as tensor parallelism wants; of the last, one of three ranks has nothing.
WIDTH, HIDDEN, CLASSES = 16, 36, 4
#: Where float16 overflows: the square of what the first layer gives for a batch that is too large.
BAD_MODULE = "1"


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Setting(NamedTuple):
    """One way to distribute the model."""

    distribute: Callable[[nn.Module], nn.Module]
    scaler: Callable[[], Any] = lambda: None
    autocast: bool = False  #: float16 through autocast
    half: bool = True  #: computes in float16, so that a large batch overflows
    same_batch: bool = False  #: the ranks work on one batch together
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    varies: bool = False  #: batches of several sizes, in the first steps above all


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), Square(), nn.Linear(HIDDEN, CLASSES))


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _fsdp2(dtype: torch.dtype | None = None) -> Callable[[nn.Module], nn.Module]:
    def distribute(model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=_mesh(), mp_policy=policy)
        fully_shard(model, mesh=_mesh(), mp_policy=policy)
        return model

    return distribute


def _fsdp1(model: nn.Module) -> nn.Module:
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), mixed_precision=half)


def _compressed(model: nn.Module) -> nn.Module:
    wrapper = nn.parallel.DistributedDataParallel(model)
    wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


def _tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _replicate(model: nn.Module) -> nn.Module:
    replicate(model)
    return model


def _zero(parameters: Any, lr: float) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns when it is imported

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=128.0)


def _sharded_scaler() -> ShardedGradScaler:
    return ShardedGradScaler("cpu", init_scale=128.0)


SETTINGS = {
    "ddp": Setting(nn.parallel.DistributedDataParallel, _scaler, autocast=True),
    "ddp-compressed": Setting(_compressed, _scaler, autocast=True),
    "fsdp1": Setting(_fsdp1, _sharded_scaler),
    "fsdp2": Setting(_fsdp2(), half=False),
    "fsdp2-bf16": Setting(_fsdp2(torch.bfloat16), half=False),
    "fsdp2-fp16": Setting(_fsdp2(torch.float16), _scaler),
    "fsdp2-fp16-sharded-scaler": Setting(_fsdp2(torch.float16), _sharded_scaler),
    "replicate": Setting(_replicate, _scaler, autocast=True),
    "zero": Setting(nn.parallel.DistributedDataParallel, _scaler, autocast=True, optimizer=_zero),
    "tensor-parallel-varying": Setting(_tensor_parallel, _scaler, autocast=True, same_batch=True, varies=True),
    "tensor-parallel": Setting(_tensor_parallel, _scaler, autocast=True, same_batch=True),
}
