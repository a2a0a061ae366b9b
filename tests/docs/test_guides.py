"""ARCHITECTURE.md and CONTRIBUTING.md name only what there is, and every room there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampscope.capture.step.cycle import State
from ampscope.capture.step.observers import ORDER
from tests.support.paths import ROOT

GUIDES = {name: (ROOT / name).read_text("utf-8") for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")}
#: Folders that a guide may leave out of a path.
BASES = ("", "ampscope", "ampscope/capture", "ampscope/cures", "ampscope/analysis", "app", "tests")


def named_paths(text: str) -> set[str]:
    """What a guide writes as code and what looks like a path."""
    found = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?|\w+\.(?:py|md|toml))`", text)
    return {path for path in found if "NAME" not in path and "RUN" not in path}


@pytest.mark.parametrize("guide", GUIDES)
def test_paths_exist(guide: str) -> None:
    everywhere = {file.name for file in (ROOT / "ampscope").rglob("*.py")}
    missing = [
        path
        for path in sorted(named_paths(GUIDES[guide]))
        if path not in everywhere and not any((ROOT / base / path).exists() for base in BASES)
    ]
    assert missing == []


def named_things(text: str) -> set[str]:
    """What a guide writes as code and what looks like a name of ours: ``CauseEntry``, ``found_calls``, ``_TAKEN``."""
    spans = re.findall(r"`([\w.]+)`", text)
    words = {word for span in spans if not span.endswith((".py", ".md", ".toml")) for word in span.split(".")}
    return {word for word in words if "_" in word.strip("_") or word.startswith("_") or re.search("[a-z][A-Z]", word)}


@pytest.mark.parametrize("guide", GUIDES)
def test_names_exist(guide: str) -> None:
    """Somewhere in the code, as ours or as torch's."""
    files = [file for folder in ("ampscope", "app", "docs") for file in (ROOT / folder).rglob("*.py")]
    ours = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    assert sorted(named_things(GUIDES[guide]) - ours) == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for text in GUIDES.values():
        assert set(re.findall(r"`make ([\w-]+)", text)) <= targets


@pytest.mark.parametrize("room", ["capture", "cures", "analysis"])
def test_every_room_is_explained(room: str) -> None:
    folders = [path for path in (ROOT / "ampscope" / room).iterdir() if (path / "__init__.py").exists()]
    rooms = {Path(path).name for path in folders}
    text = GUIDES["ARCHITECTURE.md"]
    assert {name for name in rooms if f"`{name}`" not in text} == set()


def test_every_room_of_the_package_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", GUIDES["ARCHITECTURE.md"].partition("## Rooms")[2], re.MULTILINE)
    told = {name.removesuffix(".py").removesuffix("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    rooms = {path.stem for path in (ROOT / "ampscope").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(room for room in rooms - told if not room.startswith("__")) == []


def test_every_state_is_in_the_diagram() -> None:
    assert [state.name for state in State if state.name not in GUIDES["ARCHITECTURE.md"]] == []


def test_the_table_of_parts_says_what_each_hears_of() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", GUIDES["ARCHITECTURE.md"], re.MULTILINE)
    told = {part: re.findall(r"`(\w+)`", events) for part, events in rows if "_" in events}
    parts = {part for heard in ORDER.values() for part in heard.split()}
    assert told == {part: [event for event, heard in ORDER.items() if part in heard.split()] for part in parts}


def test_a_path_that_is_not_there_is_found() -> None:
    assert named_paths("see `step/cycle.py`, `ampscope/gone.py` and `make test`") == {
        "step/cycle.py",
        "ampscope/gone.py",
    }


def test_a_name_that_is_not_there_is_found() -> None:
    told = named_things("`Gone.by`, `GoneBy` and `_gone`, `gone_by` in `gone_by.py`, `gone`")
    assert told == {"GoneBy", "_gone", "gone_by"}
