"""Finds the job that this process belongs to: its rank in it, and the name by which its launcher knows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.capture.torch_support.communication import process_group

#: Where launchers tell a process its rank and the number of ranks: torchrun and its kin, srun, Open MPI, MPICH.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
#: What torchrun calls a job that was given no id.
_NO_ID = ("", "none")


class Job(NamedTuple):
    """The processes that train together, as this one knows them."""

    rank: int = 0
    world_size: int = 1
    ids: tuple[str, ...] = ()  #: by which its launchers would know it again, the surest first
    restarted: tuple[str, ...] = ()  #: those of them under which it has run before

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole job."""
        return self.world_size == 1


def this_job(told: Mapping[str, str] = os.environ) -> Job:
    """The job of this process: by its process group where there is one already, by what its launcher told otherwise.

    Args:
        told: The environment.
    """
    rank, world_size = process_group.rank_of() or next(filter(None, (_numbers(told, *pair) for pair in _RANKS)), (0, 1))
    torchrun, slurm = _torchrun_ids(told), _slurm_ids(told)
    again = torchrun if _number(told, "TORCHELASTIC_RESTART_COUNT") else ()
    requeued = slurm if _number(told, "SLURM_RESTART_COUNT") else ()
    return Job(rank, world_size, (*torchrun, *slurm), (*again, *requeued))


def agent_folder(told: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that torchrun made for the ranks it runs on this machine; the same when it starts them again."""
    file = Path(told.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/RANK/error.json
    return file.parents[2] if len(file.parts) > 3 and file.parents[1].name.startswith("attempt_") else None


def _torchrun_ids(told: Mapping[str, str]) -> tuple[str, ...]:
    agent, given = agent_folder(told), told.get("TORCHELASTIC_RUN_ID", "")
    ids = [f"torchrun {agent.parent.name}/{agent.name}"] if agent is not None else []
    return (*ids, f"torchrun {given}") if given not in _NO_ID else tuple(ids)


def _slurm_ids(told: Mapping[str, str]) -> tuple[str, ...]:
    job, step = told.get("SLURM_JOB_ID", ""), told.get("SLURM_STEP_ID", "")
    return (f"slurm {job}.{step}" if step else f"slurm {job}",) if job else ()


def _numbers(told: Mapping[str, str], rank: str, world_size: str) -> tuple[int, int] | None:
    own, all_ranks = _number(told, rank), _number(told, world_size)
    known = own is not None and all_ranks is not None and own < all_ranks
    return (own or 0, all_ranks or 1) if known else None


def _number(told: Mapping[str, str], name: str) -> int | None:
    text = told.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
