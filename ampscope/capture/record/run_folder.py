"""A run without a folder gets one for all ranks of its job, which its launcher names, without waiting for any rank."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.capture.torch_support import process_group
from ampscope.errors import RunError
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.schema import MANIFEST
from ampscope.trace.vocabulary import VERIFY_FOLDER

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


DEFAULT_FOLDER = Path("ampscope_runs")
#: Names tried for a run of one process before giving up.
_MOST_NAMES = 10_000
#: Characters of the model's name in the folder's: paths of some systems end at 260.
_MOST_OF_A_NAME = 60

_begun: Counter[str] = Counter()  # runs that this process has begun in folders of their own, by the model's class


def is_verified() -> bool:
    """Whether ``ampscope verify`` has started this program."""
    return os.environ.get(VERIFY_FOLDER, "") != ""


def asked_folder() -> Path | None:
    """Returns the folder that ``ampscope verify`` wants, whatever the program asks for; None outside of it."""
    if not is_verified():
        return None
    told = os.environ[VERIFY_FOLDER]
    count, _begun[VERIFY_FOLDER] = _begun[VERIFY_FOLDER], _begun[VERIFY_FOLDER] + 1
    return Path(f"{told}-{count + 1}" if count else told)


def default_folder(job: Job, model: str) -> Path:
    """The folder of a new run below `DEFAULT_FOLDER`, the same on all ranks that call this for the same model.

    The first rank that asks names the run, and the others find the name in the store of the process group. Without a
    process group the name follows from what the launcher told every rank. A job that its launcher has started again
    goes on in the run that it wrote before.

    Args:
        job: The job.
        model: Class name of the model.

    Raises:
        OSError: The folder cannot be made.
    """
    count, _begun[model] = _begun[model], _begun[model] + 1
    earlier = None if count else _earlier_run(job, model)
    model = _in_a_name(model)
    if job.is_alone:
        return earlier or _claimed(model)
    proposal = earlier.name if earlier is not None else f"{_stamp(time.time())}-{model}-{uuid.uuid4().hex[:6]}"
    agreed = process_group.agreed(f"ampscope/run/{model}/{count}", proposal) if process_group.is_joined() else None
    return DEFAULT_FOLDER / (agreed or (earlier.name if earlier is not None else _derived(job, model, count)))


def _in_a_name(model: str) -> str:
    """A class name as a part of a file's name, on any system: a class that is made by a call may be called anything."""
    return re.sub(r"[^\w.+-]+", "-", model)[:_MOST_OF_A_NAME].strip("-.") or "model"


def _stamp(moment: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(moment))


def _claimed(model: str) -> Path:
    """A folder of its own for a run of one process; made here, so that two that begin at once do not share it."""
    stem = f"{_stamp(time.time())}-{model}"
    for number in range(_MOST_NAMES):
        folder = DEFAULT_FOLDER / (f"{stem}-{number}" if number else stem)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if DEFAULT_FOLDER.is_dir():
                continue
            raise
        return folder
    raise FileExistsError(f"{_MOST_NAMES} runs began in this second")


def _derived(job: Job, model: str, count: int) -> str:
    """A name that follows from what every rank was told: when and by whom the job was started, or where it meets."""
    meets_at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    agent, scheduler = agent_folder(), next((each for each in job.ids if each.startswith("slurm")), "")
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(job.world_size)  # one torchrun has started all ranks
    if here and agent is not None and agent.is_dir():
        known, began = job.ids[0], _stamp(agent.stat().st_mtime)  # nothing is added to it while the ranks run
    else:
        known, began = scheduler or (job.ids[-1] if job.ids else meets_at), ""
    digest = hashlib.sha256(f"{known} {meets_at} {model} {count}".encode()).hexdigest()
    readable = began or re.sub(r"[^\w.]+", "-", known).strip("-")[:40]
    return f"{readable}-{model}-{digest[:6]}"


def _earlier_run(job: Job, model: str) -> Path | None:
    """The newest run that this job wrote before its launcher started it again; None for a job that is new."""
    if not job.restarted or not DEFAULT_FOLDER.is_dir():
        return None
    found = [(manifest.created, folder) for folder, manifest in _manifests() if _is_of(manifest, job, model)]
    return max(found)[1] if found else None


def _is_of(manifest: Manifest, job: Job, model: str) -> bool:
    return manifest.model == model and not set(job.restarted).isdisjoint(manifest.job)


def _manifests() -> list[tuple[Path, Manifest]]:
    found = []
    for path in DEFAULT_FOLDER.glob(f"*/{MANIFEST}"):
        try:
            found.append((path.parent, read_manifest(path.parent)))
        except RunError:
            continue  # not a run, or none that could be gone on with
    return found
