"""Where capture, or a form of a call, makes a number of a tensor, the training waits: each place has its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

CAPTURE, CURES = ROOT / "ampscope" / "capture", ROOT / "ampscope" / "cures"
#: What runs in a training process.
FILES = [*CAPTURE.rglob("*.py"), *CURES.glob("*.py"), *CURES.glob("forms/*.py")]
#: Methods and functions that give the host what a tensor holds.
_READS = frozenset({"item", "tolist", "is_nonzero", "nonzero", "equal", "allclose", "cpu", "numpy"})
_CASTS = frozenset({"bool", "int", "float"})

REPLAYED = "a bad step, or one that is looked into, is run again: that waits in any case"
AUDITED = "a step that is audited, as the loop has asked for, is run again twice"
TRACED = "the statistics of a step that was traced are written down"
ARRIVED = "was waited for already, or has just been found to have arrived"
AHEAD = (
    "with healing: state that is not finite, or gradients whose squares may overflow, before a step is made with them"
)
ON_HOST = "lies on the host"
HELD = "weights or optimizer state in half precision, in the few steps that are looked at"
RARE = "at the first steps, at adoption or takeover, or once gradients already differ in scale"

#: By file and function, why a tensor may be read there.
WAITS: dict[str, str] = {
    "events.py number": ARRIVED,
    "events.py known_number": ON_HOST,
    "events.py scale": REPLAYED,
    "rerun/fidelity.py compared": ON_HOST,
    "rerun/engine.py _mean_loss": REPLAYED,
    "tape/fingerprints.py alike": REPLAYED,
    "tape/fingerprints.py _differ_little": REPLAYED,
    "isolation/device_asserts.py _check": REPLAYED,
    "heal/cured_step.py hand_over": REPLAYED,
    "heal/repairs.py repairs_of_step": REPLAYED,
    "heal/repairs.py is_bad_weight": REPLAYED,
    "keep_fp32.py _fits_all": "what a healed module returns in a call that nothing is trained by",
    "heal/planning.py why_not": REPLAYED,
    "changes/replaced_calls.py _change": REPLAYED,
    "cures/cure_search.py bad_rows_left_out": REPLAYED,
    "loop_state/still_averages.py _is_lost": REPLAYED,
    "cures/optimizer_cures.py norm_of": "a step that was bad is made again",
    "heal/optimizer_state.py _overflowing": AHEAD,
    "heal/optimizer_state.py mend_state": AHEAD,
    "heal/optimizer_state.py _keeps_pace": AHEAD,
    "checks/loss_spikes.py asks": REPLAYED,
    "checks/second_look.py _stands_still": REPLAYED,
    "checks/loss_spikes.py _shares": REPLAYED,
    "checks/audit_reference.py read": AUDITED,
    "checks/step_audit.py total_loss": AUDITED,
    "checks/still_buffers.py _stands_still": "half-precision buffers, in the few steps that are looked at",
    "step/verdict.py of_device_skip": ARRIVED,
    "checks/hidden_overflow.py between": REPLAYED,
    "checks/lost_gradients.py total_norm": REPLAYED,
    "checks/lost_gradients.py _sum": REPLAYED,
    "checks/not_training.py _came": ON_HOST,
    "checks/not_training.py arrived": ON_HOST,
    "checks/lost_gradients.py note": "a loss of several elements, in the few steps that are looked at",
    "loop_state/state_watch.py _counts": REPLAYED,
    "loop_state/state_watch.py _is_finite": ARRIVED,
    "checks/still_updates.py look": HELD,
    "loop_state/stillness.py evidence": HELD,
    "checks/still_updates.py _still": HELD,
    "checks/still_updates.py _asks": HELD,
    "checks/still_updates.py _same_as_before": HELD,
    "loop_state/stillness.py is_lost": REPLAYED,
    "loop_state/stillness.py described": REPLAYED,
    "step/scaler_history.py _copy": ON_HOST,
    "step/scaler_history.py scaler_joined": RARE,
    "torch_support/optimizer_view.py steps_made": RARE,
    "torch_support/backward_call.py factor_of": ON_HOST,
    "torch_support/call_state.py put_back": ON_HOST,
    "torch_support/call_state.py host_unchanged": ON_HOST,
    "torch_support/readback.py __init__": ON_HOST,
    "torch_support/readback.py values": ARRIVED,
    "tracing/distinct_values.py _counted": ON_HOST,
    "tracing/distinct_values.py read": TRACED,
    "tracing/batch_rows.py bad_rows": REPLAYED,
    "tracing/batch_rows.py given": REPLAYED,
    "tracing/batch_rows.py few": REPLAYED,
    "tracing/light_statistics.py read_checksums": TRACED,
    "tracing/exponent_histogram.py histograms": ON_HOST,
    "tracing/exponent_histogram.py _smallest": ON_HOST,
    "tracing/full_statistics.py _of_complex": REPLAYED,
    "tracing/full_statistics.py _look_through": REPLAYED,
    "tracing/full_statistics.py look": REPLAYED,
    "tracing/sampled_shapes.py _has_no_zero": ON_HOST,
    "tracing/sampled_shapes.py read": TRACED,
    "tracing/full_statistics.py read": REPLAYED,
    "tracing/exponent_histogram.py empty": TRACED,
    "tracing/light_statistics.py finite": REPLAYED,
    "tracing/light_statistics.py read": TRACED,
    "tracing/operand_keeper.py of": REPLAYED,
    "tracing/headroom.py _ahead": ON_HOST,
    "tracing/headroom.py ahead": ON_HOST,
    "tracing/headroom.py note": ON_HOST,
    "tracing/selection.py rows": ON_HOST,
    "tracing/traced_rows.py _shape_columns": ON_HOST,
    "usage/followed_values.py _equal_elements": "where that does not wait, and of a few sums within a run",
    "usage/gradient_edits.py _number_read": "the loop has read it",
    "usage/gradient_scales.py _all_zero": RARE,
    "usage/call_order.py _number": RARE,
}
#: Functions that turn into numbers what is no tensor.
NO_TENSORS = frozenset(
    f"{file} {function}"
    for file, functions in {
        "heal/in_force.py": "resumed_of_scaler _resumed_change",
        "heal/rank_agreement.py": "together",
        "torch_support/dynamo.py": "graphs_compiled",
        "catalogue.py": "read_form",
        "forms/bounds.py": "_factor _power_of_ten bound_of_exponential instead read",
        "forms/constants.py": "_numbers fits read",
        "forms/exponentials.py": "_beside",
        "forms/log_versions.py": "_of_one _summed log_after",
        "forms/logarithms.py": "_made_at",
        "forms/products.py": "_scaling",
        "forms/safe_where.py": "_safe_operand _write _write_named instead read",
        "forms/variance.py": "_along",
        "isolation/memory.py": "_free room _left_in _kilobytes",
        "checks/audit_reference.py": "draws_numbers",
        "loop_state/between_steps.py": "made_of_carried",
        "loop_state/loop_tensors.py": "__bool__",
        "loop_state/bad_writes.py": "_examine",
        "torch_support/backward_call.py": "creates_graph",
        "torch_support/modes.py": "look_for_cuda",
        "torch_support/failed_call.py": "_described",
        "torch_support/transforms.py": "is_wrapped",
        "torch_support/guard.py": "_holds_its_caller",
        "torch_support/process_group.py": "_is_set reduction_of_step left_apart",
        "torch_support/readback.py": "arrived",
        "torch_support/torch_private.py": "scaler_first_tracker steps_on_device",
        "tracing/operators.py": "_of_group",
        "tracing/exponent_histogram.py": "block_falls top_values",
        "tracing/dataflow.py": "wrote",
        "tracing/running_code.py": "_note",
        "usage/followed_values.py": "_memory _takes takes_scale_out",
        "usage/gradient_scales.py": "hold_scale",
        "usage/loop_numbers.py": "_rounded inconsistent_since is_round",
    }.items()
    for function in functions.split()
)


def reads() -> Iterator[str]:
    """Each function that may read a tensor, by its file and name."""
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any(map(_is_read, ast.walk(function))):
                room = CAPTURE if file.is_relative_to(CAPTURE) else CURES
                yield f"{file.relative_to(room).as_posix()} {function.name}"


def _is_read(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.args:
        plain = (ast.Constant,) if node.func.id == "float" else (ast.Constant, ast.Name, ast.Attribute)
        return node.func.id in _CASTS and not isinstance(node.args[0], plain)
    return isinstance(node.func, ast.Attribute) and node.func.attr in _READS


def test_each_has_its_reason() -> None:
    assert set(reads()) == WAITS.keys() | NO_TENSORS


def test_a_read_is_noticed() -> None:
    code = "def f(t):\n    return t.item()\ndef g(t):\n    return bool(t > 0)\ndef h(t):\n    return t + 1"
    functions = [each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.FunctionDef)]
    assert [any(map(_is_read, ast.walk(each))) for each in functions] == [True, True, False]
