"""A gate's outcome as continuous integrations and code hosts read it: annotations, JUnit, Markdown, SARIF."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from ampscope.analysis.causes.catalogue import cause_in_words, what_in_words
from ampscope.analysis.diagnosis.gate import Gate, Limit, LimitCheck, Outcome
from ampscope.analysis.results import Diagnosis, Finding, Incident, Remedy, SourceLine
from ampscope.analysis.words import capitalized, when_in_words
from ampscope.numerals import number
from ampscope.report import numbers
from ampscope.report.diagnosis_words import remedy_in_words
from ampscope.report.safe_text import visible, visible_lines
from ampscope.trace.vocabulary import Severity

NAMES = {
    Limit.VERDICT: "verdict",
    Limit.MAX_SKIPPED: "skipped steps",
    Limit.NO_NEW_OVERFLOW: "new overflows",
    Limit.MIN_HEADROOM: "headroom",
}
OUTCOMES = {Outcome.PASSED: "passed", Outcome.FAILED: "failed", Outcome.NOT_KNOWN: "not known"}


def quantity(limit: Limit, amount: float | None, *, missing: str = "") -> str:
    """A number in the unit of its limit: ``1.2 %``, ``3 bits``."""
    if amount is None:
        return missing
    if limit is Limit.MAX_SKIPPED:
        return numbers.share(amount)
    return f"{number(amount)} bits" if limit is Limit.MIN_HEADROOM else numbers.count(amount)


def failures(gate: Gate) -> list[LimitCheck]:
    """The checks that did not pass."""
    return [check for check in gate.checks if check.outcome is not Outcome.PASSED]


def matters(diagnosis: Diagnosis) -> Iterator[Incident | Finding]:
    """Yields the errors and warnings, beginning with the one that the diagnosis tells first."""
    items: list[Incident | Finding] = [*diagnosis.incidents, *diagnosis.findings]
    first = [diagnosis.primary] if diagnosis.primary is not None else []
    others = [item for item in items if item != diagnosis.primary]
    yield from (item for item in [*first, *others] if item.severity is not Severity.INFO)


def title(item: Incident | Finding) -> str:
    """Returns an incident's or finding's cause and steps in one line."""
    words = what_in_words(item)
    return visible(f"{capitalized(words)}, {when_in_words(item)}")


def first_change(item: Incident | Finding) -> Remedy | None:
    """The remedy that stands first, where one does."""
    return item.remedies[0] if item.remedies else None


def next_change(item: Incident | Finding) -> str:
    """The first remedy with its change of a line, as plain text; empty where there is none."""
    remedy = first_change(item)
    if remedy is None:
        return ""
    change = remedy.diff or remedy.code
    return "\n".join(filter(None, (f"Next: {remedy.text}", change.rstrip("\n"))))


def in_full(item: Incident | Finding) -> str:
    """Why, and the first remedy, as plain text."""
    return "\n".join(filter(None, (item.explanation, next_change(item))))


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


def as_junit(gate: Gate) -> str:
    """The XML document; a limit that was not kept is a failure, one of which nothing is known an error."""
    of = {outcome: sum(check.outcome is outcome for check in gate.checks) for outcome in Outcome}
    counts = {
        "tests": str(len(gate.checks)),
        "failures": str(of[Outcome.FAILED]),
        "errors": str(of[Outcome.NOT_KNOWN]),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": visible(f"ampscope {gate.diagnosis.run.name}"), **counts}
    )
    for check in gate.checks:
        case = ElementTree.SubElement(suite, "testcase", _case(check, gate))
        if check.outcome is not Outcome.PASSED:
            kind = "failure" if check.outcome is Outcome.FAILED else "error"
            told = ElementTree.SubElement(case, kind, {"message": visible(check.text), "type": str(check.limit)})
            told.text = "\n".join(visible_lines(_details(check, gate)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(check: LimitCheck, gate: Gate) -> dict[str, str]:
    line = {"file": check.source.file, "line": str(check.source.line)} if check.source is not None else {}
    run = gate.diagnosis.run.name
    return {"classname": visible(f"ampscope.{run}"), "name": NAMES[check.limit], **line}


def _details(check: LimitCheck, gate: Gate) -> str:
    primary = gate.diagnosis.primary
    if check.limit is not Limit.VERDICT or primary is None:
        return check.text
    return f"{check.text}\n{next_change(primary)}"


_MARKS = {Outcome.PASSED: "\N{WHITE HEAVY CHECK MARK}", Outcome.FAILED: "\N{CROSS MARK}", Outcome.NOT_KNOWN: "❔"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~])")


def as_markdown(gate: Gate) -> str:
    """A heading, a row for each check, and what went wrong with the change that cures it."""
    return "\n".join(_lines(gate)) + "\n"


def _lines(gate: Gate) -> Iterator[str]:
    run = gate.diagnosis.run
    yield f"### {_MARKS[gate.outcome]} AMPscope: {_text(run.name)} {OUTCOMES[gate.outcome]}"
    yield ""
    yield "| check | | measured | allowed | baseline | |"
    yield "|---|---|---|---|---|---|"
    for check in gate.checks:
        yield _row(check)
    for item in matters(gate.diagnosis):
        yield from ("", f"**{_text(title(item))}**", "", _text(item.explanation))
        remedy = first_change(item)
        if remedy is not None:
            yield from ("", f"Next: {_text(remedy.text)} ({_text(remedy_in_words(remedy))})")
            yield from _block(remedy.diff or "", "diff") if remedy.diff else _block(remedy.code, "python")


def _row(check: LimitCheck) -> str:
    each = [quantity(check.limit, amount) for amount in (check.measured, check.allowed, check.baseline)]
    outcome = f"{_MARKS[check.outcome]} {OUTCOMES[check.outcome]}"
    return f"| {' | '.join([NAMES[check.limit], outcome, *each, _text(check.text)])} |"


def _block(text: str, language: str) -> Iterator[str]:
    """A block of code; its fence is longer than any in the code."""
    if not text:
        return
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    yield from ("", f"{fence}{language}", *visible_lines(text), fence)


def _text(text: str) -> str:
    """Someone else's text, on one line, with what Markdown would read taken out of force."""
    return _SPECIAL.sub(r"\\\1", visible(text))


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(gate: Gate, *, version: str) -> str:
    """The log file: a rule for each cause and each limit, a result for each that was met.

    Args:
        gate: What was found.
        version: AMPscope's.
    """
    results = [_item(item) for item in matters(gate.diagnosis)]
    results += [
        _result(f"gate/{check.limit}", "error" if check.outcome is Outcome.FAILED else "warning", check.text)
        | _location(check.source, check.module)
        for check in failures(gate)
        if check.limit is not Limit.VERDICT or gate.diagnosis.primary is None
    ]
    rules = {f"gate/{limit}": f"The run does not keep its limit: {name}." for limit, name in NAMES.items()}
    rules |= {item.cause: f"{cause_in_words(item.cause)}." for item in matters(gate.diagnosis)}
    met = {result["ruleId"] for result in results}
    driver = {
        "name": "AMPscope",
        "semanticVersion": version,
        "rules": [
            {"id": name, "shortDescription": {"text": capitalized(text)}}
            for name, text in sorted(rules.items())
            if name in met
        ],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _item(item: Incident | Finding) -> dict[str, Any]:
    module = item.module if isinstance(item, Incident) else ""
    result = _result(str(item.cause), _LEVELS[item.severity], f"{title(item)}. {in_full(item)}")
    remedy = first_change(item)
    properties: dict[str, Any] = {"step": item.step, "lastStep": item.last_step, "count": item.count, "rank": item.rank}
    if remedy is not None and remedy.diff:
        properties |= {"diff": remedy.diff}
    return result | _location(item.source, module) | {"properties": properties}


def _result(rule: str, level: str, text: str) -> dict[str, Any]:
    return {"ruleId": rule, "level": level, "message": {"text": "\n".join(map(visible, text.splitlines()))}}


def _location(source: SourceLine | None, module: str) -> dict[str, Any]:
    """Returns the place in SARIF; its fingerprint leaves out the line number, which moves from commit to commit."""
    place: dict[str, Any] = {}
    if source is not None:
        region = {"startLine": max(1, source.line), "snippet": {"text": visible(source.code)}}
        place["physicalLocation"] = {"artifactLocation": {"uri": uri(source.file)}, "region": region}
    if module:
        place["logicalLocations"] = [{"fullyQualifiedName": visible(module), "kind": "module"}]
    if not place:
        return {}
    same = "|".join((source.file, source.code, module) if source is not None else (module,))
    return {
        "locations": [place],
        "partialFingerprints": {"ampscope/v1": hashlib.sha256(same.encode("utf-8", "replace")).hexdigest()[:16]},
    }


def uri(file: str) -> str:
    """A recorded path as a URI: relative to the repository where it was recorded so, else ``file:``."""
    if PureWindowsPath(file).drive:
        return f"file:///{quote(PureWindowsPath(file).as_posix(), safe='/:')}"
    path = quote(PurePosixPath(file).as_posix(), errors="replace")
    return f"file://{path}" if path.startswith("/") else path
