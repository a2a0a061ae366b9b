"""Slow growth in transformers is told before it breaks: the layer, and the step at which it will."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Phase, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.planted_faults.growth.growing_models import (
    BERT,
    GPT2,
    LLAMA,
    TOKENS,
    VOCABULARY,
    Anatomy,
    Frozen,
    Grown,
    Logits,
    Plant,
    Residual,
    Sharp,
    Sinking,
)

MODELS = (GPT2, BERT, LLAMA)
EVERY, MOST_STEPS = 5, 900
Making = Callable[[Any, Anatomy], Plant]


def train(where: Anatomy, plant: Making, steps: int, folder: Path | None = None) -> int:
    """Fine-tunes under float16, watched where a folder is given; returns the step whose loss was not finite."""
    torch.manual_seed(0)
    model: Any = where.build()
    planted = plant(model, where)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batches = torch.randint(1, VOCABULARY, (8, 4, TOKENS))
    scope = None if folder is None else ampscope.watch(model, scaler, dir=folder, quiet=True, every=EVERY)
    broke = steps
    for step in range(steps):
        optimizer.zero_grad()
        tokens = batches[step % len(batches)]
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        planted.step()
        if not loss.isfinite():
            broke = step
            break
    if scope is not None:
        scope.close()
    return broke


def warned(diagnosis: Diagnosis, cause: Cause) -> Incident:
    assert diagnosis.verdict is Verdict.AT_RISK, diagnosis.summary
    assert isinstance(diagnosis.primary, Incident)
    assert diagnosis.primary.cause is cause
    return diagnosis.primary


def in_time(told: Incident, true: int) -> None:
    assert told.forecast_step is not None
    assert abs(told.forecast_step - true) <= 0.2 * true


def each_model(plants: list[Making]) -> list[Any]:
    """Every model with every plant, for `make plants`.

    Each plant in GPT-2 is of `make check`, Residual in every model, and the two of the ordinary run.
    """

    def marks(where: Anatomy, plant: Making) -> tuple[pytest.MarkDecorator, ...]:
        if where is GPT2:
            return () if plant in (Residual, Grown) else (pytest.mark.slow,)
        return (pytest.mark.slow,) if plant is Residual else (pytest.mark.plants_full,)

    return [
        pytest.param(where, plant, id=f"{where}-{plant.__name__}", marks=marks(where, plant))
        for plant in plants
        for where in MODELS
    ]


@pytest.mark.parametrize(("where", "plant"), each_model([Residual, Logits]))
def test_growth_is_told_with_its_layer_when_a_third_of_the_way_is_seen(
    where: Anatomy, plant: Making, run_folder: Path
) -> None:
    true = train(where, plant, MOST_STEPS)
    assert 200 < true < MOST_STEPS, "the plant itself breaks, and slowly"
    assert train(where, plant, true // 3, run_folder) == true // 3
    told = warned(ampscope.diagnose(run_folder), Cause.TREND_OVERFLOW)
    assert told.module == (where.down if plant is Residual else where.attention)
    assert told.phase == Phase.FORWARD
    assert told.source is not None
    in_time(told, true)


@pytest.mark.parametrize(
    "where",
    [pytest.param(it, id=str(it), marks=pytest.mark.slow if it is GPT2 else pytest.mark.plants_full) for it in MODELS],
)
def test_gradients_that_slide_under_are_told_when_a_third_of_the_way_is_seen(
    where: Anatomy, run_folder: Path, tmp_path: Path
) -> None:
    train(where, Sinking, 360, tmp_path / "whole")
    sunk = first_subnormal(tmp_path / "whole")
    thirds = sorted({-(-step // (3 * EVERY)) * EVERY for step in sunk.values() if step > EARLY})
    for seen in thirds:  # the last of the sampled steps
        train(where, Sinking, seen + 1, run_folder / str(seen))
        diagnosis = ampscope.diagnose(run_folder / str(seen))
        if diagnosis.verdict is not Verdict.HEALTHY:
            break
    told = warned(diagnosis, Cause.TREND_UNDERFLOW)
    assert told.source is not None
    true = sunk[told.op, told.module, told.source.line]
    assert 150 < true < 350
    assert seen <= true / 3 + EVERY, "its own way"
    in_time(told, true)


#: Gradients that are below from the first steps on do not slide.
EARLY = 100


def first_subnormal(folder: Path) -> dict[tuple[str, str, int], int]:
    """Of each place in backward, the first traced step in which all that it gives is below float16's normal numbers."""
    sizes: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    with ampscope.open_run(folder) as run:
        sites = {site.site: site for site in run.rows(Table.SITES, phase=Phase.BACKWARD)}
        for row in run.rows(Table.OPS, source="live"):
            site = sites.get(row.site)
            if site is not None and site.out_dtypes == ("float16",):
                seen = sizes[site.op, site.module, site.line]
                largest = max(abs(row.min or 0.0), abs(row.max or 0.0))
                seen[row.step] = max(seen.get(row.step, 0.0), largest)
    normal = FINFO["float16"].smallest_normal
    sunk = {place: [step for step, size in seen.items() if size < normal] for place, seen in sizes.items()}
    return {place: min(steps) for place, steps in sunk.items() if steps}


@pytest.mark.parametrize(("where", "plant"), each_model([Plant, Grown, Sharp, Frozen]))
def test_a_training_in_which_nothing_grows_is_healthy(where: Anatomy, plant: Making, run_folder: Path) -> None:
    assert train(where, plant, 200, run_folder) == 200
    diagnosis = ampscope.diagnose(run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary
    assert diagnosis.run.steps == 200
