"""Compares what a faithful replay left with what the real step left: how far the replay can be trusted."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampscope.capture.changes.replay_results import ReplayResult, Symptom
from ampscope.capture.isolation.device_asserts import can_assert
from ampscope.capture.rerun.player import Player
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.process_group import GradientReduction
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.light_statistics import extremes, finite, measurable
from ampscope.capture.tracing.sites import dtype_name
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.dtypes import FINFO
from ampscope.trace.evidence import Reduction
from ampscope.trace.schema import ReplayStatus


def compared(player: Player, tracer: Tracer, real: Symptom, step: TapedStep, *, after_good_step: bool) -> ReplayResult:
    """Judges a replay that could be played, by what it left and what the real step left.

    A replay has the gradients that this rank computed. Where the real ones were reduced across ranks, what was bad here
    was bad in them too, but not the other way round.

    Args:
        player: Has played the step.
        tracer: Has observed that.
        real: What was bad in the real step.
        step: The step.
        after_good_step: The step before ended with finite gradients, so that what it left in them is finite.
    """
    differences = list(dict.fromkeys(player.differences.found))
    reduction = step.reduction() if real.gradients else None
    if real and player.finite and step.ran_through():
        reason = (
            "a model was called through torch.func, and run again on what is known of its inputs it came out finite"
        )
        return ReplayResult(ReplayStatus.UNAVAILABLE, "; ".join([reason, *differences]))
    if real and player.finite:
        left = bool(step.had_gradients & real.gradients) and not (reduction is not None and after_good_step)
        own_loss = real.loss or not step.losses_were_finite
        return _not_the_same(player, differences, late=step.late, own_loss=own_loss) or _came_out_finite(
            player, reduction, differences, own_loss=own_loss, added_to_unknown=left
        )
    if real.gradients and not _same_gradients(real, player.bad_gradients, reduction):
        player.differences.note("other parameters have non-finite gradients")
        differences.append(player.differences.found[-1])
    if player.differences.came_of_change:
        return _run_late(differences)
    if differences:
        unordered = _added_in_any_order(tracer, player.devices) if player.differences.are_rounding else ""
        differences += [unordered] if unordered else []
        return ReplayResult(ReplayStatus.DIVERGED, "; ".join(differences), within_rounding=bool(unordered))
    return ReplayResult(ReplayStatus.EXACT)


#: Forward ops whose sums come in the order in which the threads of an accelerator come by, unless deterministic
#: algorithms are asked for. Source: torch.use_deterministic_algorithms.
_UNORDERED = frozenset(
    {
        *("_embedding_bag", "_index_put_impl", "_sparse_addmm", "_sparse_mm", "bincount", "cumsum", "histc"),
        *("index_add", "index_put", "index_reduce", "nll_loss2d_forward", "put", "scatter_add", "scatter_reduce"),
        *("segment_reduce",),
    }
)


def _added_in_any_order(tracer: Tracer, devices: Iterable[torch.device]) -> str:
    """Why values may come out rounded otherwise, in words; empty where no such reason is known."""
    if not can_assert(devices):
        return ""
    ops = (tracer.points.sites.point(number).op for number in tracer.outputs.sites())
    found = next((op for op in ops if op.removeprefix("aten.").partition(".")[0].removesuffix("_") in _UNORDERED), "")
    return f"by no more than rounding, for {found} adds in no fixed order on this device" if found else ""


def _not_the_same(player: Player, differences: list[str], *, late: bool, own_loss: bool) -> ReplayResult | None:
    """Why a replay that came out finite was not run on the same calls and values; None where it may have been."""
    if player.differences.held_otherwise or (late and differences):
        return _run_late(differences)
    if not own_loss and player.hooked:
        reason = f"a replay does not run the functions attached to parameters ({player.hooked}), and came out finite"
        return ReplayResult(ReplayStatus.UNAVAILABLE, reason)
    return None


def _run_late(differences: list[str]) -> ReplayResult:
    reason = "the step was run again after what it computed with had changed, or may have"
    return ReplayResult(ReplayStatus.UNAVAILABLE, "; ".join([reason, *differences]))


def _came_out_finite(
    player: Player,
    reduction: GradientReduction | None,
    differences: list[str],
    *,
    own_loss: bool,
    added_to_unknown: bool,
) -> ReplayResult:
    if added_to_unknown and not own_loss:
        reason = "the step added to gradients from before it, which may be what is not finite; they are not replayed"
        return ReplayResult(ReplayStatus.UNAVAILABLE, reason)
    if reduction is None or own_loss:
        reason = "the same calls came out finite this time"
        return ReplayResult(ReplayStatus.NOT_REPRODUCED, "; ".join([reason, *differences]))
    reduced = _reduced(player, reduction)
    if differences:
        reason = "this rank's part came out finite, and its gradients were reduced across ranks"
        return ReplayResult(ReplayStatus.DIVERGED, "; ".join([*differences, reason]), reduced=reduced)
    return ReplayResult(ReplayStatus.RECEIVED, _how_received(reduced), reduced=reduced)


def _reduced(player: Player, reduction: GradientReduction) -> Reduction:
    dtype, largest, fits = _sent(player, reduction.dtype)
    by, ranks, hook = reduction.by, reduction.ranks, reduction.hook
    return Reduction(by=by, ranks=ranks, hook=hook, dtype=dtype, largest=largest, overflows=not fits)


def _sent(player: Player, dtype: torch.dtype | None) -> tuple[str, float, bool]:
    """Measures what this rank would have given into a reduction of its gradients across ranks.

    Args:
        player: Has played the step.
        dtype: That they are sent in; None for their own.

    Returns:
        The dtype's name (empty where they differ), the greatest magnitude, and whether all fit the dtype.
    """
    gradients = [local(p.grad) for _, p in player.substitutes.parameters() if p.grad is not None]
    dtypes = {dtype or gradient.dtype for gradient in gradients}
    largest = [torch.stack(extremes(each)).abs().max() for each in gradients if measurable(each)]
    fits = dtype is None or all(finite(each.to(dtype)) for each in largest)
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 else "", max(map(float, largest), default=0.0), fits


def _how_received(reduced: Reduction) -> str:
    """Says where non-finite gradients came from, as far as this rank can know it."""
    own = "this rank's own gradients came out finite when they were computed again"
    if reduced.overflows:
        most = FINFO[reduced.dtype].max
        return (
            f"{own}, up to {reduced.largest:.3g}; {reduced.hook} sends them as {reduced.dtype}, which ends at {most:g}"
        )
    if reduced.hook:
        return f"{own}; {reduced.by} sent them to the other ranks through {reduced.hook}, and got theirs"
    if reduced.by:
        return f"{own}; {reduced.by} averaged them with those of the other ranks"
    return f"{own}; between backward and optimizer this rank exchanged values with others, which may have brought it"


def _same_gradients(real: Symptom, bad: frozenset[str], reduction: GradientReduction | None) -> bool:
    """Whether the gradients that came out non-finite are those of the real step, or those of this rank among them.

    The real ones are looked at after the loop has clipped them, and a norm that is not finite spreads to all it clips.
    """
    bad = bad & real.judged or bad
    if reduction is not None and bad:
        return bad <= real.gradients or bool(reduction.hook)  # what a hook makes of a bad value is its own affair
    return real.gradients == bad or (bool(bad) and bad < real.gradients == real.judged)
