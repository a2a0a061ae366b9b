"""Two small trainings that differ in one thing: a comparison tells it first, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ampscope.analysis.replay.compare.compare_results import DifferenceKind, Likeness
from ampscope.analysis.replay.compare.comparison import compare
from tests.integration.loops.compared.trainings import Plan, train

Trained = Callable[[Plan], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains by a plan, each once."""
    known: dict[Plan, Path] = {}
    folder = tmp_path_factory.mktemp("compared")

    def of(plan: Plan) -> Path:
        if plan not in known:
            known[plan] = train(folder / f"run-{len(known)}", plan)
        return known[plan]

    return of


#: What is changed, what is told first: its kind, its module, what the sentence says.
PLANTED: dict[str, tuple[dict[str, Any], tuple[DifferenceKind, str, str]]] = {
    "a module with another name": (
        {"attribute": "layers"},
        (DifferenceKind.RENAMED, "blocks.0.norm", "blocks of A is called layers in B"),
    ),
    "an inserted layer": (
        {"inserted": True},
        (DifferenceKind.MODULE, "blocks.1", "B has a module that A lacks: blocks.1"),
    ),
    "a removed layer": (
        {"final_norm": False},
        (DifferenceKind.MODULE, "norm", "A has a module that B lacks: norm (LayerNorm"),
    ),
    "another eps": (
        {"norm_eps": 1e-3},
        (DifferenceKind.SCALAR, "blocks.0.norm", "eps of native_layer_norm is 1e-5 in A and 0.001 in B"),
    ),
    "a dropped cast": (
        {"float_logits": False},
        (
            DifferenceKind.CAST,
            "blocks.0.attention",
            "A alone has a cast that the code asks for from bfloat16 to float32",
        ),
    ),
    "an op in another dtype": (
        {"float_gate": True},
        (DifferenceKind.CAST, "blocks.1", "B alone has a cast that the code asks for from bfloat16 to float32"),
    ),
    "another activation": (
        {"activation": "relu"},
        (DifferenceKind.OP, "blocks.0.act", "A runs gelu where B runs relu"),
    ),
    "a matmul the other way round": ({"transposed": True}, (DifferenceKind.LINE, "blocks.0.attention", "(bmm)")),
    "key and value exchanged": (
        {"swapped": True},
        (DifferenceKind.VALUE, "blocks.0.attention", "bmm in blocks.0.attention"),
    ),
    "another dropout": (
        {"dropout": 0.2},
        (DifferenceKind.SCALAR, "blocks.0.drop", "p of bernoulli is 0.9 in A and 0.8 in B"),
    ),
    "a removed residual": ({"residual": False}, (DifferenceKind.OP, "blocks.1", "A alone runs add")),
    "another mask": (
        {"mask": -1e9},
        (DifferenceKind.SCALAR, "blocks.0.attention", "value of masked_fill is -10,000 in A and -1e9 in B"),
    ),
    "another divisor": (
        {"divided_by": 16.0},
        (DifferenceKind.SCALAR, "blocks.0.attention", "other of div is 4 in A and 16 in B"),
    ),
    "autocast off for one module's part": (
        {"without_autocast": True},
        (DifferenceKind.DTYPE, "blocks.1.up", "(autocast: bfloat16 in A, off in B)"),
    ),
    "label smoothing": ({"smoothing": 0.1}, (DifferenceKind.OP, "", "B alone runs")),
    "another seed": ({"seed": 1}, (DifferenceKind.SEED, "embedding", "another seed")),
    "other random numbers": (
        {"draw_seed": 6},
        (DifferenceKind.RANDOM, "blocks.0.drop", "Step 0 drew other random numbers"),
    ),
    "another batch": ({"batch_seed": 4}, (DifferenceKind.BATCH, "embedding", "another batch")),
    "one bit of one weight": (
        {"flipped": True},
        (
            DifferenceKind.WEIGHTS,
            "blocks.1.up",
            "blocks.1.up.weight differs when step 0 begins, by as much as one changed bit",
        ),
    ),
    "parameters in bfloat16": (
        {"half_embedding": True},
        (DifferenceKind.DTYPE, "embedding", "1 parameter in embedding: float32 in A, bfloat16 in B"),
    ),
    "another loss scale": (
        {"scale": 2048.0},
        (DifferenceKind.SCALE, "", "scale of step 0 is 1,024 in A and 2,048 in B"),
    ),
    "another learning rate": (
        {"lr": 2e-2},
        (DifferenceKind.LEARNING_RATE, "embedding", "is 0.01 in A and 0.02 in B: step 0 is"),
    ),
    "another eps of the optimizer": (
        {"optimizer_eps": 1e-4},
        (DifferenceKind.OPTIMIZER, "embedding", "Step 0 is the same"),
    ),
    "another weight decay": ({"weight_decay": 0.1}, (DifferenceKind.OPTIMIZER, "embedding", "Step 0 is the same")),
    "another optimizer": ({"optimizer": "sgd"}, (DifferenceKind.OPTIMIZER, "embedding", "the optimizer, its settings")),
    "gradient accumulation": (
        {"micro_batches": 2},
        (DifferenceKind.MICRO_BATCHES, "", "1 micro-batch in A and 2 micro-batches in B"),
    ),
    "activation checkpointing": (
        {"checkpointed": True},
        (DifferenceKind.RECOMPUTE, "blocks.2.norm", "of its forward again in backward"),
    ),
    "no autocast": (
        {"autocast": None},
        (DifferenceKind.DTYPE, "blocks.0.attention.qkv", "in bfloat16 in A and in float32 in B"),
    ),
    "autocast to another dtype": (
        {"autocast": torch.float16},
        (DifferenceKind.DTYPE, "blocks.0.attention.qkv", "in bfloat16 in A and in float16 in B"),
    ),
}

#: Those of which nothing is out of what rounding allows for.
WITHIN_TOLERANCE = {
    "a module with another name",
    "a dropped cast",
    "an op in another dtype",
    "autocast off for one module's part",
    "a matmul the other way round",
    "one bit of one weight",
    "parameters in bfloat16",
    "activation checkpointing",
    "autocast to another dtype",
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_changed_is_told_first(trained: Trained, name: str) -> None:
    changed, (kind, module, text) = PLANTED[name]
    found = compare(trained(Plan()), trained(replace(Plan(), **changed)))
    first = found.differences[0]
    assert (first.kind, first.module) == (kind, module)
    assert text in first.text
    assert not found.identical
    expected = Likeness.WITHIN_TOLERANCE if name in WITHIN_TOLERANCE else Likeness.DIFFERENT
    assert found.likeness is expected
    within = name in WITHIN_TOLERANCE or name == "no autocast"  # its verdict is another
    assert (found.first_divergence is None) == within


#: With which op the numbers part.
PARTED: dict[str, tuple[int, str, str]] = {
    "an inserted layer": (0, "aten.native_layer_norm.default", "blocks.1.norm"),
    "another eps": (0, "aten.native_layer_norm.default", "blocks.0.norm"),
    "another activation": (0, "aten.relu.default", "blocks.0.act"),
    "another mask": (0, "aten.masked_fill.Scalar", "blocks.0.attention"),
    "a removed residual": (0, "aten.add.Tensor", "blocks.1"),
    "another batch": (0, "input", "embedding"),
    "another learning rate": (1, "parameter", "embedding"),
}


@pytest.mark.parametrize("name", PARTED)
def test_the_numbers_part_with_the_op_that_was_changed(trained: Trained, name: str) -> None:
    found = compare(trained(Plan()), trained(replace(Plan(), **PLANTED[name][0]))).first_divergence
    assert found is not None
    assert (found.step, found.op, found.module) == PARTED[name]


@pytest.mark.parametrize("changed", [{}, {"dropout": 0.0}, {"autocast": torch.float16}, {"autocast": None}])
def test_a_run_is_identical_to_its_rerun(trained: Trained, tmp_path: Path, changed: dict[str, Any]) -> None:
    plan = replace(Plan(), **changed)
    found = compare(trained(plan), train(tmp_path / "again", plan))
    assert (found.likeness, found.first_divergence, found.differences) == (Likeness.IDENTICAL, None, ())
    assert (found.identical, found.traced) == (True, 3)


def test_a_run_is_identical_to_itself_at_any_tolerance(trained: Trained) -> None:
    run = trained(Plan())
    assert compare(run, run, tolerance=0.0).identical
    assert compare(f"{run}@1", f"{run}@1", tolerance=0.0).identical


def test_the_other_way_round_the_same_is_told(trained: Trained) -> None:
    found = compare(trained(Plan(inserted=True)), trained(Plan()))
    assert found.differences[0].kind is DifferenceKind.MODULE
    assert "A has a module that B lacks: blocks.1" in found.differences[0].text


def test_what_rounding_allows_for_is_too_much_where_nothing_is_asked_for(trained: Trained) -> None:
    runs = trained(Plan()), trained(Plan(float_gate=True))
    assert compare(*runs).likeness is Likeness.WITHIN_TOLERANCE
    found = compare(*runs, tolerance=0.0)
    assert found.likeness is Likeness.DIFFERENT
    assert found.differences[0].kind is DifferenceKind.CAST


def test_a_tolerance_that_is_wide_enough_lets_another_eps_pass(trained: Trained) -> None:
    found = compare(trained(Plan()), trained(Plan(norm_eps=1e-3)), tolerance=0.5)
    assert found.likeness is Likeness.WITHIN_TOLERANCE
    assert found.differences[0].kind is DifferenceKind.SCALAR


def test_two_steps_of_a_run_were_given_other_weights_and_another_batch(trained: Trained) -> None:
    run = trained(Plan())
    found = compare(f"{run}@1", f"{run}@2")
    kinds = [each.kind for each in found.differences]
    assert kinds[:2] == [DifferenceKind.WEIGHTS, DifferenceKind.BATCH]
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.other_step) == (1, 2)
