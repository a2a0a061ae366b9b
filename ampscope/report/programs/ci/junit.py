"""A gate as JUnit XML, which every continuous integration shows: a test case for each check."""

from __future__ import annotations

from xml.etree import ElementTree

from ampscope.analysis.diagnosis.gate_limits import Check, Gate, Limit, Outcome
from ampscope.report.programs.ci.told import NAMES, next_change
from ampscope.report.safe_text import visible, visible_lines


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


def _case(check: Check, gate: Gate) -> dict[str, str]:
    line = {"file": check.source.file, "line": str(check.source.line)} if check.source is not None else {}
    run = gate.diagnosis.run.name
    return {"classname": visible(f"ampscope.{run}"), "name": NAMES[check.limit], **line}


def _details(check: Check, gate: Gate) -> str:
    primary = gate.diagnosis.primary
    if check.limit is not Limit.VERDICT or primary is None:
        return check.text
    return f"{check.text}\n{next_change(primary)}"
