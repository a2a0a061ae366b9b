"""Every analysis that scans large tables says the same whichever engine it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import narwhals as nw
import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.overview import overview
from ampscope.analysis.overview.rank_lives import ranks_at_a_glance
from ampscope.analysis.overview.run_list import pulse
from ampscope.analysis.overview.search import search
from ampscope.analysis.precision.over_steps import precision_over_steps
from ampscope.analysis.precision.plan import plan
from ampscope.analysis.precision.ranges.heat_map import Measure, View, heat_map
from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.ranges import ranges_of
from ampscope.analysis.scale.answer import scale_answer
from ampscope.analysis.scale.scale_history import scale_history, skipped_steps
from ampscope.analysis.scale.what_if import scale_record
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import GROWING_TABLES
from tests.integration.samples.engines.recorded_runs import hard_run
from tests.integration.samples.engines.sameness import differences
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")]

#: With an incident, a finding, and neither; of a second incident nothing else is asked.
SAMPLES = ("attention-overflow", "clip-before-unscale", "healthy")


def ranges_and_heat_maps(run: Run) -> object:
    found = measured_places(run)
    return ranges_of(found), [heat_map(found, View(measure=each)) for each in Measure]


def scale(run: Run) -> object:
    return scale_history(run), skipped_steps(run), scale_answer(run), scale_record(run)


def ranks(run: Run) -> object:
    return ranks_at_a_glance(run)


def at_a_glance(run: Run) -> object:
    return pulse(run), overview(run), search(run, "blocks"), precision_over_steps(run)


def formats(run: Run) -> object:
    return plan(run)


def verdict(run: Run) -> object:
    return diagnose(run)


ANALYSES = (ranges_and_heat_maps, scale, ranks, at_a_glance, formats, verdict)


@pytest.fixture(scope="module", params=[*SAMPLES, "hard"])
def pair(request: pytest.FixtureRequest, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """The same run, opened with either engine."""
    writing = []
    if request.param == "hard":
        path = tmp_path_factory.mktemp("runs of {one} day, rank=7") / "hard"
        writing = hard_run(path)
    else:
        path = ROOT / "sample_logs" / request.param
    with open_run(path) as one, open_run(path, engine=spark) as other:
        yield [one, other]
    for builder in writing:
        builder.close()


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda each: each.__name__)
def test_engines_agree(pair: list[Run], analysis: Callable[[Run], object]) -> None:
    one, other = map(analysis, pair)
    assert list(differences(one, other))[:5] == []


def test_tables_have_the_same_rows_and_columns(pair: list[Run]) -> None:
    for table in GROWING_TABLES:
        frames = [run.table(table) for run in pair]
        natives = [nw.to_native(frame) for frame in frames]
        assert natives[0].__class__ is not natives[1].__class__
        assert frames[0].collect_schema() == frames[1].collect_schema()
        one, other = (sorted(repr(list(row.values())) for row in collect(frame)) for frame in frames)
        assert one == other


def test_a_difference_is_found() -> None:
    assert list(differences({"a": (1.0, float("nan"))}, {"a": (1.0 + 1e-9, float("nan"))})) == [
        "['a'][0]: 1.0 and 1.000000001"
    ]


def test_a_run_that_grows_is_seen_to(spark: Any, tmp_path: Path) -> None:
    (*_, last) = writing = hard_run(tmp_path / "growing")
    with open_run(last.folder, engine=spark) as run:
        before = pulse(run, rank=2).steps
        last.step()
        last.leave_open()
        assert pulse(run, rank=2).steps == before + 1
    for builder in writing:
        builder.close()
