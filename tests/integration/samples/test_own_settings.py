"""A scaler that is simulated with the settings of a recorded run has that run's history, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.analysis.scale.what_if import ScalerRules, scale_record, what_if
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", ["healthy", "attention-overflow", "log-zero"])
def test_it_is_the_history(name: str) -> None:
    with open_run(ROOT / "sample_logs" / name) as run:
        history, record = scale_history(run), scale_record(run)
    answer = what_if(record, ScalerRules.of(history.settings, history.first))
    assert answer.log2_scale == history.log2_scale
    assert answer.log2_scale.values == tuple(np.log2(record.scale).tolist())
    assert answer.skips == tuple(record.step[record.skipped].tolist())
    assert len(answer.skips) == answer.skipped >= 3
