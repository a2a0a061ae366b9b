"""What a loop does to gradients between backward and ``scaler.step``: right is what would be the same unscaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.model_parts import grad_of
from tests.support.training.usage_bench import Bench, Watch, findings_of, found_in

CLIP, RAW = Cause.MISUSE_CLIP_BEFORE_UNSCALE, Cause.MISUSE_NO_UNSCALE
Edit = Callable[[Bench], object]

pytestmark = pytest.mark.usefixtures("device")

RIGHT: dict[str, Edit] = {}
WRONG: dict[str, tuple[Edit, Cause]] = {}


def right(edit: Edit) -> Edit:
    RIGHT[edit.__name__] = edit
    return edit


def wrong(cause: Cause) -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        WRONG[edit.__name__] = edit, cause
        return edit

    return register


@wrong(CLIP)
def scaled_down_all_at_once(bench: Bench) -> None:
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bench.gradients)))
    torch._foreach_mul_(bench.gradients, torch.clamp(0.1 / (norm + 1e-6), max=1.0))


@wrong(CLIP)
def scaled_down_by_a_norm_summed_in_python(bench: Bench) -> None:
    total = sum(gradient.norm(2).item() ** 2 for gradient in bench.gradients) ** 0.5
    for gradient in bench.gradients:
        gradient.mul_(min(1.0, 0.1 / (total + 1e-6)))


@wrong(CLIP)
def replaced_by_clamped_ones(bench: Bench) -> None:
    for parameter in bench.parameters:
        parameter.grad = grad_of(parameter).clamp(-0.1, 0.1)


@wrong(CLIP)
def given_clamped_data(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.data = torch.clip(gradient.data, -0.1, 0.1)


@wrong(CLIP)
def divided_by_their_norm(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.div_(gradient.norm() + 1e-8)


@wrong(CLIP)
def clipped_to_the_weights(bench: Bench) -> None:
    for parameter in bench.parameters:
        gradient = grad_of(parameter)
        most, norm = parameter.detach().norm().clamp(min=1e-3) * 0.01, gradient.norm()
        gradient.copy_(torch.where(norm > most, gradient * (most / norm), gradient))


@wrong(CLIP)
def reduced_to_their_signs(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.sign_()


@wrong(RAW)
def given_noise(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


@wrong(RAW)
def given_weight_decay(bench: Bench) -> None:
    for parameter in bench.parameters:
        grad_of(parameter).add_(parameter.detach(), alpha=0.01)


@wrong(RAW)
def given_weight_decay_after_the_scale_was_read(bench: Bench) -> None:
    bench.scaler.get_scale()
    for parameter in bench.parameters:
        grad_of(parameter).add_(parameter.detach() * 0.01)
        grad_of(parameter).add_(parameter.detach(), alpha=0.01)


@wrong(RAW)
def given_each_other_times_the_scale(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.add_(gradient.flip(0), alpha=bench.scaler.get_scale())


@wrong(RAW)
def given_products_of_each_other(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.addcmul_(gradient.clone(), gradient.clone(), value=1e-3)


@wrong(RAW)
def given_their_ratios(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.addcdiv_(gradient.clone(), gradient.clone() + 1e-8)


@wrong(RAW)
def drawn_to_the_weights(bench: Bench) -> None:
    for parameter in bench.parameters:
        grad_of(parameter).lerp_(parameter.detach(), 0.01)


@wrong(RAW)
def made_finite(bench: Bench) -> None:
    for gradient in bench.gradients:
        torch.nan_to_num(gradient, nan=0.0, posinf=1e4, neginf=-1e4, out=gradient)


@wrong(RAW)
def compared_with_a_threshold(bench: Bench) -> None:
    if bench.norm > 1e6:
        bench.optimizer.zero_grad()


@wrong(RAW)
def unscaled_by_hand_and_by_the_scaler(bench: Bench) -> None:
    inverse = 1.0 / bench.scaler.get_scale()
    for gradient in bench.gradients:
        gradient.mul_(inverse)


@right
def averaged_over_varying_counts(bench: Bench) -> None:
    """Gradient norms are read and gradients are divided, but not by each other."""
    sum(gradient.norm().item() ** 2 for gradient in bench.gradients)
    tokens = int(torch.randint(1000, 5000, ()))
    for gradient in bench.gradients:
        gradient.mul_(16 / tokens)


@right
def centred(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.sub_(gradient.mean())


@right
def projected_onto_each_other(bench: Bench) -> None:
    one = bench.gradients[0].clone()
    other = one.flip(0)
    bench.gradients[0].copy_(one - (one * other).sum() / other.pow(2).sum() * other)


@right
def measured_with_an_infinite_clip(bench: Bench) -> None:
    nn.utils.clip_grad_norm_(bench.parameters, float("inf"))


@right
def clipped_in_units_of_the_scale(bench: Bench) -> None:
    nn.utils.clip_grad_norm_(bench.parameters, 0.5 * bench.scaler.get_scale())


@right
def clipped_by_value_in_units_of_the_scale(bench: Bench) -> None:
    nn.utils.clip_grad_value_(bench.parameters, 0.1 * bench.scaler.get_scale())


@right
def held_within_the_scale(bench: Bench) -> None:
    scale = bench.scaler.get_scale()
    for gradient in bench.gradients:
        gradient.clamp_(-scale, scale)


@right
def given_weight_decay_in_units_of_the_scale(bench: Bench) -> None:
    scale = bench.scaler.get_scale()
    for parameter in bench.parameters:
        grad_of(parameter).add_(parameter.detach(), alpha=0.01 * scale)
        grad_of(parameter).add_(0.01 * scale * parameter.detach())
        grad_of(parameter).addcmul_(parameter.detach(), parameter.detach(), value=-5e-4 * scale)
    torch._foreach_add_(bench.gradients, torch._foreach_mul([*bench.parameters], 0.01 * scale))


@right
def averaged_with_each_other(bench: Bench) -> None:
    for gradient in bench.gradients:
        gradient.add_(gradient.flip(0), alpha=0.5)
        gradient.lerp_(gradient.mean(), 0.1)
        gradient.addcmul_(gradient.clone(), torch.rand_like(gradient), value=0.5)
        gradient.addcdiv_(gradient.square(), gradient.abs() + 1e-8, value=0.5)


@right
def unscaled_clipped_and_scaled_again(bench: Bench) -> None:
    scale = bench.scaler.get_scale()
    for gradient in bench.gradients:
        gradient.div_(scale)
    nn.utils.clip_grad_norm_(bench.parameters, 0.1)
    for gradient in bench.gradients:
        gradient.mul_(scale)


@right
def looked_at_for_infinities(bench: Bench) -> None:
    if not torch.isfinite(bench.norm) or bench.norm == 0:
        bench.optimizer.zero_grad()


@right
def rows_cleared(bench: Bench) -> None:
    gradient = bench.gradients[0]
    gradient[0] = 0.0
    gradient.masked_fill_(gradient == 0, 0.0)
    gradient.copy_(torch.where(gradient.isnan(), torch.zeros_like(gradient), gradient))


@pytest.mark.parametrize("divisor", ["the scale", "nothing"])
def test_a_penalty_on_gradients_of_a_loss_scaled_by_its_seed_has_to_divide_by_the_scale(
    divisor: str, run_folder: Path
) -> None:
    def loop(watch: Watch) -> object:
        bench = Bench(watch, scale=256.0)
        for _ in range(3):
            bench.optimizer.zero_grad()
            loss, scale = bench.loss(), bench.scaler.get_scale()
            seed = torch.ones_like(loss) * scale
            slopes: Sequence[Tensor] = torch.autograd.grad(loss, bench.parameters, grad_outputs=seed, create_graph=True)
            slopes = [each / scale for each in slopes] if divisor == "the scale" else slopes
            penalty = (torch.stack([each.norm() for each in slopes]).norm() - 1) ** 2
            bench.scaler.scale(loss + penalty).backward()
            bench.step()
        return bench.state

    causes = {each.cause for each in findings_of(loop, run_folder)}
    assert causes == (set() if divisor == "the scale" else {RAW})


@pytest.mark.parametrize("name", WRONG)
def test_an_edit_that_depends_on_the_scale_is_found_at_its_line(name: str, run_folder: Path) -> None:
    edit, cause = WRONG[name]
    diagnosis, _ = found_in(lambda watch: [edit(bench) for bench in [Bench(watch)] for _ in bench.steps()], run_folder)
    (finding,) = diagnosis.findings
    assert (finding.cause, finding.step) == (cause, 0)
    assert finding.source is not None
    assert finding.source.function == name or finding.source.function.startswith(f"{name}.")
    assert diagnosis.primary == finding


@pytest.mark.parametrize("name", RIGHT)
def test_an_edit_that_commutes_with_the_scale_is_right(name: str, run_folder: Path) -> None:
    def loop(watch: Watch) -> object:
        bench = Bench(watch)
        for _ in bench.steps():
            RIGHT[name](bench)
        return bench.state

    assert findings_of(loop, run_folder) == ()


@pytest.mark.parametrize("name", sorted(WRONG.keys() - {unscaled_by_hand_and_by_the_scaler.__name__}))
def test_after_unscale_every_edit_is_right(name: str, run_folder: Path) -> None:
    edit, _ = WRONG[name]

    def loop(watch: Watch) -> object:
        bench = Bench(watch)
        for _ in bench.steps():
            bench.scaler.unscale_(bench.optimizer)
            edit(bench)
        return bench.state

    assert findings_of(loop, run_folder) == ()
