"""What the plan reads off histograms is what casting the tensors themselves gives, within a percentage point."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.precision.plan import Plan, plan
from ampscope.analysis.precision.plan_modules import MX, NAMES, SCALED, FormatLoss
from ampscope.analysis.rounding import FORMATS
from ampscope.trace.schema import BLOCK, Source
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import statistics_of

#: The last step, whose every statistic is recorded, as of step 0; of those between, extremes alone.
FULL = 16
#: A percentage point.
POINT = 0.01


class Times(nn.Module):
    """Scales what it is given."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Exp(nn.Module):
    """Spreads its values over many powers of two."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Outliers(nn.Module):
    """Makes a few channels larger than the others, as those of language models are."""

    factors: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        factors = torch.ones(width)
        factors[::20] = 300.0
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def model() -> nn.Sequential:
    layers = {
        "first": nn.Linear(16, 64),
        "tiny": Times(3e-6),  # around the subnormals of float16
        "huge": Times(2e10),  # past its end
        "norm": nn.LayerNorm(64),
        "gelu": nn.GELU(),
        "outliers": Outliers(64),
        "mix": nn.Linear(64, 64),
        "back": nn.LayerNorm(64),
        "wide": Times(4.0),
        "exp": Exp(),
        "relu": nn.ReLU(),
        "last": nn.LayerNorm(64),
    }
    return nn.Sequential(OrderedDict(layers))


class Kept:
    """The outputs of modules and the gradients at their inputs, as hooks see them, by module and step."""

    def __init__(self, of: nn.Sequential) -> None:
        self.step = 0
        self.outputs: dict[tuple[str, int], Tensor] = {}
        self.gradients: dict[tuple[str, int], Tensor] = {}
        for name, module in of.named_children():
            module.register_forward_hook(self._output(name))
            if name != "first":  # its input asks for no gradient
                module.register_full_backward_hook(self._gradient(name))

    def _output(self, name: str):  # type: ignore[no-untyped-def]  # a hook
        def keep(module: nn.Module, given: object, output: Tensor) -> None:
            self.outputs[name, self.step] = output.detach().clone()

        return keep

    def _gradient(self, name: str):  # type: ignore[no-untyped-def]  # a hook
        def keep(module: nn.Module, inputs: tuple[Tensor | None, ...], outputs: object) -> None:
            if inputs[0] is not None:
                self.gradients[name, self.step] = inputs[0].detach().clone()

        return keep


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Kept]:
    """A training of seventeen steps, of which the first and the last have every statistic."""
    torch.manual_seed(3)
    net, folder = model(), tmp_path_factory.mktemp("planned") / "run"
    kept, optimizer = Kept(net), torch.optim.SGD(net.parameters(), 0.05)
    scope = ampscope.watch(net, dir=folder, every=1)
    for step in range(FULL + 1):
        kept.step = step
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)) * (1.0 + 0.05 * step)
        loss = (net(x) * torch.linspace(-1, 1, 64)).pow(3).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scope.close()
    with ampscope.open_run(folder) as run:
        return plan(run), kept


#: Modules whose values are one op's results, and nothing else.
MODULES = ("tiny", "huge", "gelu", "outliers", "wide", "exp", "relu")
EXACT = tuple(name for name in NAMES if name not in MX and name != "tf32")


def loss_of(found: Plan, module: str, name: str) -> FormatLoss:
    return next(each for each in found.modules if each.module == module).formats[name]


def fates(tensor: Tensor, factor: Tensor | float, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements overflow, are flushed or become subnormal when they are multiplied and cast."""
    into = MX.get(name) or FORMATS[name]
    sizes = tensor.double().abs() * factor
    cast = sizes.float().to(getattr(torch, into.name)).double()  # saturates in some versions of torch
    over = sizes > into.overflow if into.tie_fits else sizes >= into.overflow
    assert (~cast[over].isfinite() | (cast[over] == into.largest)).all()
    assert (cast[~over] <= into.largest).all()
    return over, (sizes > 0) & (cast == 0), (cast > 0) & (cast < 2.0**into.normal)


def block_factors(tensor: Tensor, name: str) -> Tensor:
    """The power of two by which each element is multiplied, by the largest of its block, as in OCP's MX formats."""
    top = int(torch.tensor(MX[name].largest).log2().floor())
    largest = tensor.double().abs().reshape(-1, BLOCK).amax(1, keepdim=True).clamp_min(2.0**-120)
    return (2.0 ** (top - largest.log2().floor())).expand(-1, BLOCK).reshape(tensor.shape)


def amax_before(tensors: dict[tuple[str, int], Tensor], module: str) -> float:
    return max(float(tensors[module, step].abs().max()) for step in range(FULL))


def expected(
    tensors: dict[tuple[str, int], Tensor], module: str, name: str, *, by_mass: bool, scale: float = 1.0
) -> list[float]:
    """The shares of the steps with every statistic, 0 and the last."""
    parts, whole = [0.0, 0.0, 0.0], 0.0
    for step in (0, FULL):
        tensor = tensors[module, step]
        largest = float(tensor.abs().max()) if step == 0 else amax_before(tensors, module)
        factor: Tensor | float = 1.0
        if name in SCALED:
            factor = FORMATS[name].largest / largest
        elif name in MX:
            factor = block_factors(tensor, name)
        elif name == "float16":
            factor = scale
        weights = tensor.double().abs() if by_mass else torch.ones(tensor.shape, dtype=torch.float64)
        sums = [float(weights[fate].sum()) for fate in fates(tensor, factor, name)]
        parts = [part + each for part, each in zip(parts, sums, strict=True)]
        whole += float(weights.sum())
    return [part / whole for part in parts]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("module", MODULES)
def test_values(trained: tuple[Plan, Kept], module: str, name: str) -> None:
    found, kept = trained
    loss = loss_of(found, module, name)
    told = [loss.overflow_share, loss.lost_share, loss.subnormal_share]
    real = expected(kept.outputs, module, name, by_mass=False)
    assert told == pytest.approx(real, abs=POINT)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("module", MODULES)
def test_gradients(trained: tuple[Plan, Kept], module: str, name: str) -> None:
    found, kept = trained
    loss = loss_of(found, module, name)
    told = [loss.gradient_overflow_share, loss.gradient_lost_share, loss.gradient_subnormal_share]
    assert found.gradient_scale is not None
    real = expected(kept.gradients, module, name, by_mass=True, scale=found.gradient_scale)
    assert told == pytest.approx(real, abs=POINT)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("module", MODULES)
def test_values_in_blocks(trained: tuple[Plan, Kept], module: str, name: str) -> None:
    found, kept = trained
    loss = loss_of(found, module, name)
    real = expected(kept.outputs, module, name, by_mass=False)
    assert [loss.overflow_share, loss.lost_share, loss.subnormal_share] == pytest.approx(real, abs=POINT)
    assert loss.lost_at_most is not None
    assert real[1] <= loss.lost_at_most + POINT


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_blocks_in_no_order(name: str, spread: float, tmp_path: Path) -> None:
    values = (spread * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).exp()
    sign = torch.where(torch.arange(64) % 3 == 0, -1.0, 1.0)
    trace = TraceBuilder(tmp_path)
    site = trace.site(module="net", out_dtypes=("float32",), in_dtypes=("float32",))
    trace.step(scale=None, traced=Source.LIVE)
    trace.op(site, source=Source.LIVE, **statistics_of((values * sign).numpy()))
    with ampscope.open_run(trace.close()) as run:
        loss = loss_of(plan(run), "net", name)
    told = [loss.overflow_share, loss.lost_share, loss.subnormal_share]
    real = [float(fate.double().mean()) for fate in fates(values, block_factors(values, name), name)]
    assert told == pytest.approx(real, abs=POINT)
    assert name != "mxfp8_e4m3" or spread < 4 or real[1] > 0.1


def test_what_it_says_covers_each_fate(trained: tuple[Plan, Kept]) -> None:
    """The values above are no row of zeros."""
    losses = [loss_of(trained[0], module, name) for module in MODULES for name in NAMES]
    assert any((each.overflow_share or 0) > 0.1 for each in losses)
    assert any((each.lost_share or 0) > 0.1 for each in losses)
    assert any((each.subnormal_share or 0) > 0.1 for each in losses)
    assert any((each.gradient_lost_share or 0) > 0.01 for each in losses)
