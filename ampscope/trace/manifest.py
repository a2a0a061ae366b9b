"""The manifest of a run, ``RUN/run.json``: what was trained, where, with which versions, and in which segments."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ampscope.errors import RunDamaged, RunNotFound, RunTooNew
from ampscope.trace.files.layout import MOST_RANKS, TEMPORARY_SUFFIX
from ampscope.trace.files.whole_files import read_regular, write_whole
from ampscope.trace.schema import MANIFEST, SCHEMA_VERSION

#: What leads on from a run that was not found.
NAME_IT = "Give the run's folder; ampscope.watch and the callbacks print it when a training begins."


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One process that wrote into the run; the first is segment 0."""

    started: float  #: unix time, seconds
    pid: int
    locked: bool = True  #: whether the file system let it lock the folder, so that its death can be told
    #: what was otherwise than in the segment before: of each fact of the manifest what it had been and what it was
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The facts of a run that hold for all its rows."""

    schema: int = SCHEMA_VERSION
    ampscope: str = ""  #: version of AMPscope
    versions: dict[str, str] = field(default_factory=dict)  #: python, torch, platform, ...
    device: str = ""
    world_size: int = 1
    created: float = 0.0  #: unix time, seconds
    name: str = ""
    model: str = ""  #: class name of the watched model
    parameters: int = 0  #: elements of all its parameters
    configuration: dict[str, Any] = field(default_factory=dict)
    job: tuple[str, ...] = ()  #: names by which the launcher knows the job again when it starts it anew
    segments: tuple[Segment, ...] = ()
    closed: float | None = None  #: unix time at which the last segment was closed; null while open or after a crash
    tags: tuple[str, ...] = ()
    host: str = ""  #: name of the machine whose process made the run


_SHAPES: dict[str, type | tuple[type, ...]] = {
    "ampscope": str,
    "versions": dict,
    "device": str,
    "world_size": int,
    "created": (int, float),
    "name": str,
    "model": str,
    "parameters": int,
    "configuration": dict,
    "job": list,
    "segments": list,
    "closed": (int, float, type(None)),
    "tags": list,
    "host": str,
}


#: Unix time at which the calendar that Python knows ends.
_LAST_MOMENT = 253_402_300_799
#: Bytes that are read of a manifest.
_MOST_BYTES = 4 << 20
#: What its whole numbers may be.
_BOUNDS = {"world_size": (1, MOST_RANKS), "parameters": (0, 2**63 - 1)}


def changed_facts(before: Manifest, now: Manifest) -> dict[str, tuple[Any, Any]]:
    """Returns facts that differ where a run goes on, old and new: versions, device, ranks, model, torch's settings."""
    was, now_is = _facts(before), _facts(now)
    names = dict.fromkeys((*was, *now_is))
    return {name: (was.get(name), now_is.get(name)) for name in names if was.get(name) != now_is.get(name)}


def _facts(manifest: Manifest) -> dict[str, Any]:
    """The facts by name, as JSON holds them; what was asked of the recording is none."""
    facts: dict[str, Any] = {"ampscope": manifest.ampscope, "device": manifest.device, "ranks": manifest.world_size}
    facts |= {"model": manifest.model, "parameters": manifest.parameters} | dict(manifest.versions)
    kernels = json.loads(json.dumps(manifest.configuration.get("kernels", {}), default=str))
    return facts | ({f"setting {name}": value for name, value in kernels.items()} if isinstance(kernels, dict) else {})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; a reader sees the old one or the new one, never half of it.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(folder / MANIFEST, lambda path: _write_text(path, _to_json(manifest)))


def write_first_manifest(folder: Path, manifest: Manifest) -> bool:
    """Write the manifest unless there is one, whoever else may be doing so; returns whether this one is it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / MANIFEST
    whole = path.with_name(f"{MANIFEST}.{os.getpid()}-{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    write_whole(whole, lambda temporary: _write_text(temporary, _to_json(manifest)))
    try:
        os.link(whole, path)  # fails where there is one, which a rename would replace
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return _write_new(path, _to_json(manifest))
    finally:
        whole.unlink(missing_ok=True)
    return True


def _write_new(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
    except FileExistsError:
        return False
    return True


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the run in ``folder``; keys that this version does not know are passed over.

    Raises:
        RunNotFound: the folder holds no run.
        RunDamaged: the manifest cannot be read.
        RunTooNew: it was written with a newer schema.
    """
    path = folder / MANIFEST
    return manifest_from(path, _content(path))


def manifest_from(path: Path, content: bytes) -> Manifest:
    """The manifest that was read at ``path``.

    Raises:
        RunDamaged: it is none.
        RunTooNew: it was written with a newer schema.
    """
    data = _load(path, content)
    schema = data.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise _damaged(path, "it names no schema version")
    if schema > SCHEMA_VERSION:
        raise RunTooNew(
            f"{path.parent} was written with trace schema {schema}, this AMPscope reads up to {SCHEMA_VERSION}: "
            "upgrade it (pip install --upgrade ampscope)."
        )
    return _from_json(path, data)


def _to_json(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), indent=2, default=str)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", errors="replace")


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFound(f"There is no run in {path.parent}: it holds no {MANIFEST}. {NAME_IT}") from None
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _load(path: Path, content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(data, dict):
        raise _damaged(path, "it is not a JSON object")
    return data


def _from_json(path: Path, data: dict[str, Any]) -> Manifest:
    for key, shape in _SHAPES.items():
        if key in data and not isinstance(data[key], shape):
            raise _damaged(path, f"its {key!r} is a {type(data[key]).__name__}")
    for key, (least, most) in _BOUNDS.items():
        if not least <= data.get(key, least) <= most:
            raise _damaged(path, f"its {key!r} is not between {least} and {most}")
    known = {item.name: data[item.name] for item in fields(Manifest) if item.name in data}
    if "created" in known and not 0 <= known["created"] <= _LAST_MOMENT:  # not a number neither
        known["created"] = 0.0
    known["segments"] = tuple(_segment(path, item) for item in data.get("segments", ()))
    for names in ("tags", "job"):
        known[names] = tuple(str(name) for name in data.get(names, ()))
    known["versions"] = {key: str(version) for key, version in data.get("versions", {}).items()}
    return Manifest(**known)


def _segment(path: Path, data: Any) -> Segment:
    try:
        return Segment(
            started=float(data["started"]),
            pid=int(data["pid"]),
            locked=bool(data.get("locked", True)),
            changed=_changed(data.get("changed")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(path, "one of its segments has no start or pid") from error


def _changed(data: Any) -> dict[str, tuple[Any, Any]]:
    """Reads the facts that a segment changed; none where a damaged or older manifest does not tell."""
    pairs = data.items() if isinstance(data, dict) else ()
    return {str(name): (pair[0], pair[1]) for name, pair in pairs if isinstance(pair, list) and len(pair) == 2}


def _damaged(path: Path, why: str) -> RunDamaged:
    return RunDamaged(
        f"{path} cannot be read: {why}. The tables beside it may be intact; restore the file from a copy of the run."
    )
