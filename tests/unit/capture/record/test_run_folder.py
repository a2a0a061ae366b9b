"""Where a run without a folder of its own goes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampscope.capture.record import run_folder
from ampscope.capture.record.run_folder import DEFAULT_FOLDER, Job, default_folder
from ampscope.trace.manifest import Manifest, write_manifest

RANKS = [Job(rank, 4, ("torchrun agents/nightly", "torchrun nightly")) for rank in range(4)]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which nothing has run, and a process that has watched nothing, which no launcher has started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "_begun", Counter())
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def in_new_process(job: Job, model: str = "GPT") -> Path:
    run_folder._begun.clear()
    return default_folder(job, model)


def recorded(folder: Path, *, created: float, model: str = "GPT", ids: tuple[str, ...] = RANKS[0].ids) -> Path:
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(created=created, model=model, job=ids))
    return folder


def test_processes_that_begin_at_once_have_a_folder_each() -> None:
    with ThreadPoolExecutor(8) as processes:
        folders = list(processes.map(lambda _: default_folder(Job(), "GPT"), range(8)))
    assert len(set(folders)) == 8
    assert all(folder.is_dir() for folder in folders)


def test_a_file_in_its_place_is_an_error() -> None:
    DEFAULT_FOLDER.write_text("")
    with pytest.raises(OSError, match=str(DEFAULT_FOLDER)):
        default_folder(Job(), "GPT")


def test_ranks_without_a_process_group_come_to_the_same_folder() -> None:
    (folder,) = {in_new_process(job) for job in RANKS}
    assert folder.parent == DEFAULT_FOLDER
    assert folder.name.startswith("torchrun-nightly-GPT-")


def test_another_job_comes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {in_new_process(RANKS[0]), in_new_process(RANKS[0]._replace(ids=("slurm 77.0",)))}
    for port in ("29500", "29501"):
        monkeypatch.setenv("MASTER_ADDR", "node7")
        monkeypatch.setenv("MASTER_PORT", port)
        folders.add(in_new_process(Job(0, 2)))
    assert len(folders) == 4


def test_the_agents_start_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = tmp_path / "torchelastic_a1b2" / "none_c3d4"
    agent.mkdir(parents=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    names = set()
    for rank in range(4):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(agent / "attempt_0" / str(rank) / "error.json"))
        names.add(in_new_process(RANKS[rank]).name)
    (name,) = names
    assert run_folder._stamp(agent.stat().st_mtime) in name


def test_a_second_run_of_a_process_has_a_folder_of_its_own() -> None:
    assert default_folder(RANKS[0], "GPT") != default_folder(RANKS[0], "GPT")


class TestStartedAgain:
    AGAIN = RANKS[0]._replace(restarted=RANKS[0].ids)

    def test_it_goes_on_in_its_newest_run(self) -> None:
        recorded(DEFAULT_FOLDER / "first", created=1.0)
        newest = recorded(DEFAULT_FOLDER / "second", created=2.0)
        recorded(DEFAULT_FOLDER / "another job", created=3.0, ids=("torchrun weekly",))
        recorded(DEFAULT_FOLDER / "another model", created=3.0, model="CNN")
        (DEFAULT_FOLDER / "damaged").mkdir()
        (DEFAULT_FOLDER / "damaged" / "run.json").write_text("{")
        assert default_folder(self.AGAIN, "GPT") == newest
        assert default_folder(self.AGAIN, "GPT") != newest, "the process's next run is another"

    def test_alone_too(self) -> None:
        run = recorded(DEFAULT_FOLDER / "run", created=1.0)
        assert default_folder(self.AGAIN._replace(world_size=1), "GPT") == run

    def test_a_new_job_of_the_same_name_does_not(self) -> None:
        run = recorded(DEFAULT_FOLDER / "run", created=1.0)
        assert default_folder(RANKS[0], "GPT") != run

    def test_without_an_earlier_run_it_begins_one(self) -> None:
        assert default_folder(self.AGAIN, "GPT").parent == DEFAULT_FOLDER
