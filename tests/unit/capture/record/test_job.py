"""The job of a process, by what its launcher told it."""

from __future__ import annotations

import pytest

from ampscope.capture.record.run_folder import Job, agent_folder, this_job

ERROR_FILE = "/tmp/torchelastic_a1b2/none_c3d4/attempt_0/1/error.json"
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": ERROR_FILE,
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
AGENT, SLURM = "torchrun torchelastic_a1b2/none_c3d4", "slurm 77.0"


def test_a_process_by_itself() -> None:
    assert this_job({}) == Job()
    assert Job().is_alone


@pytest.mark.parametrize(
    ("told", "job"),
    [
        (TORCHRUN, Job(1, 4, (AGENT,))),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "nightly"}, Job(1, 4, (AGENT, "torchrun nightly"))),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, Job(1, 4, (AGENT,), (AGENT,))),
        (SRUN, Job(3, 8, (SLURM,))),
        ({**SRUN, "SLURM_RESTART_COUNT": "1"}, Job(3, 8, (SLURM,), (SLURM,))),
        ({**SRUN, **TORCHRUN}, Job(1, 4, (AGENT, SLURM))),
        ({**SRUN, **TORCHRUN, "SLURM_RESTART_COUNT": "1"}, Job(1, 4, (AGENT, SLURM), (SLURM,))),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Job(0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Job(1, 2)),
    ],
)
def test_launchers(told: dict[str, str], job: Job) -> None:
    assert this_job(told) == job


@pytest.mark.parametrize(
    "told",
    [
        {"RANK": "1"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"},  # a shell in an allocation of eight tasks
    ],
)
def test_what_names_no_rank_of_several(told: dict[str, str]) -> None:
    assert this_job(told).is_alone


def test_the_agents_folder_is_that_of_all_attempts_and_ranks() -> None:
    again = ERROR_FILE.replace("attempt_0/1", "attempt_3/0")
    assert agent_folder({"TORCHELASTIC_ERROR_FILE": ERROR_FILE}) == agent_folder({"TORCHELASTIC_ERROR_FILE": again})
    assert agent_folder({}) is None
    assert agent_folder({"TORCHELASTIC_ERROR_FILE": "/home/me/errors/of/training.json"}) is None
