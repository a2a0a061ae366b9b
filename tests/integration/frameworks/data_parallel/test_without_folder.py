"""A job on several ranks that is watched without ``dir=`` writes one run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ampscope  # noqa: E402  # after the check that torch is there
from ampscope.trace.read.run import Run  # noqa: E402
from ampscope.trace.schema import Table  # noqa: E402
from tests.integration.frameworks.data_parallel.without_folder import DEATH, STEPS  # noqa: E402
from tests.support.torchrun import torchrun  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

PROGRAM = "tests.integration.frameworks.data_parallel.without_folder"
#: torchrun's own store outlives a restart with the addresses at which the dead ranks met, and gloo takes those for the
#: new ones: ranks that do not start together then wait for each other until gloo's timeout, watched or not
#: (pytorch/pytorch#135712). Rank 0's own store dies with it.
STORE_OF_RANK_0 = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def only_run(folder: Path) -> Run:
    """The one run that was begun in a folder."""
    (run,) = (folder / "ampscope_runs").iterdir()
    return ampscope.open_run(run)


@pytest.mark.parametrize("way", ["after", "before"])
def test_all_ranks_are_in_one_run(way: str, tmp_path: Path) -> None:
    printed = torchrun(PROGRAM, tmp_path, way, ranks=2)
    run = only_run(tmp_path)
    assert run.ranks == [0, 1]
    assert (run.manifest.world_size, run.status) == (2, "closed")
    assert [len(run.rows(Table.STEPS, rank=rank)) for rank in run.ranks] == [STEPS] * 2
    assert printed.count("recording to") == 1
    assert run.path.name in printed


def test_a_run_without_rank_0_can_be_read(tmp_path: Path) -> None:
    torchrun(PROGRAM, tmp_path, "last", ranks=2)
    run = only_run(tmp_path)
    assert run.ranks == [1]
    assert (run.manifest.world_size, run.status) == (2, "closed")
    assert len(run.rows(Table.STEPS)) == STEPS


def test_a_job_that_is_started_again_goes_on_in_its_run(tmp_path: Path) -> None:
    torchrun(PROGRAM, tmp_path, "restarted", ranks=2, options=["--max-restarts", "1"], variables=STORE_OF_RANK_0)
    run = only_run(tmp_path)
    assert run.ranks == [0, 1]
    assert len(run.manifest.segments) == 2
    for rank in run.ranks:
        steps = run.rows(Table.STEPS, rank=rank)
        assert [row.step for row in steps] == list(range(DEATH + STEPS))
        assert [row.segment for row in steps] == [0] * DEATH + [1] * STEPS


def test_two_jobs_at_once_do_not_mix(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as jobs:
        for job in [jobs.submit(torchrun, PROGRAM, tmp_path, "after", ranks=2) for _ in range(2)]:
            job.result()
    runs = [ampscope.open_run(path) for path in (tmp_path / "ampscope_runs").iterdir()]
    assert len(runs) == 2
    for run in runs:
        assert run.ranks == [0, 1]
        assert len(run.rows(Table.STEPS)) == 2 * STEPS
