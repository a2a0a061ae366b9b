"""Chooses a folder for a run that has none of its own: one for all ranks of a job, found without waiting for any."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections import Counter
from pathlib import Path

from ampscope.capture.record.job import Job, agent_folder
from ampscope.capture.torch_support.communication import process_group
from ampscope.errors import RunError
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.schema import MANIFEST
from ampscope.trace.vocabulary import VERIFY_FOLDER

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
