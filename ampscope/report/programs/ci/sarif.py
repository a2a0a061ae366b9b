"""A gate's findings as SARIF 2.1.0, which code hosts show beside the lines of a program."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.analysis.diagnosis.gate_limits import Gate, Limit, Outcome
from ampscope.analysis.results import Finding, Incident, SourceLine
from ampscope.report.programs.ci.told import NAMES, failures, first_change, in_full, matters, title
from ampscope.report.safe_text import visible
from ampscope.trace.vocabulary import Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning"}


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
            {"id": name, "shortDescription": {"text": text[:1].upper() + text[1:]}}
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
    """Where it is; the fingerprint leaves out the line's number, which moves from commit to commit."""
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
