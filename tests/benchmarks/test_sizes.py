"""The benchmarks know every size of training there is."""

from __future__ import annotations

import incidents
import overhead
from workload import SIZES


def test_each_benchmark_knows_how_long_to_run_each_size() -> None:
    for steps in (overhead.STEPS, incidents.RUN_STEPS, incidents.MEMORY_STEPS, incidents.INCIDENTS):
        assert steps.keys() == SIZES.keys()
