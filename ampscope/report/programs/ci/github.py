"""A gate as annotations of GitHub's: workflow commands that put a message beside a line of a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.diagnosis.gate_limits import Gate, Limit, Outcome
from ampscope.analysis.results import SourceLine
from ampscope.report.programs.ci.told import failures, in_full, matters, title
from ampscope.trace.vocabulary import Severity

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning"}


def as_annotations(gate: Gate) -> str:
    """A line for each error and warning of the diagnosis, and for each limit that was not kept."""
    return "".join(f"{row}\n" for row in dict.fromkeys(_rows(gate)))


def _rows(gate: Gate) -> Iterator[str]:
    for item in matters(gate.diagnosis):
        yield _command(_LEVELS[item.severity], title(item), in_full(item), item.source)
    for check in failures(gate):
        if check.limit is Limit.VERDICT and gate.diagnosis.primary is not None:
            continue  # its items have been told
        level = "error" if check.outcome is Outcome.FAILED else "warning"
        yield _command(level, "AMPscope: a limit is not kept", check.text, check.source)


def _command(level: str, name: str, message: str, source: SourceLine | None) -> str:
    place = {"file": source.file, "line": str(source.line)} if source is not None else {}
    properties = ",".join(f"{key}={_property(text)}" for key, text in {**place, "title": name}.items())
    return f"::{level} {properties}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
