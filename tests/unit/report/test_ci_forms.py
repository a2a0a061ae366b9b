"""A gate as JUnit, SARIF, Markdown and annotations: read back by what reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sarif_pydantic import Sarif

from ampscope.analysis.diagnosis.gate import Gate, Limit, LimitCheck, Outcome, gate
from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.analysis.results import SourceLine
from ampscope.report.ci import as_annotations, as_junit, as_markdown, as_sarif, uri
from ampscope.report.terminal.verdict_text import gate_text
from ampscope.trace.read.run import open_run
from tests.support.command import Command
from tests.support.paths import SAMPLES
from tests.support.printed import printed
from tests.support.verdicts.by_hand import BROKEN, HEALTHY

HOSTILE = "a\x1b[2J%0A]]>&<b>|`x`\n::stop-commands::"


@pytest.fixture(scope="module")
def overflow() -> Gate:
    with open_run(SAMPLES / "attention-overflow") as run:
        return gate(run, Limits(max_skipped=0.01, no_new_overflow=True, min_headroom=2.0))


def _gate(outcome: Outcome, text: str = "as it is", *, diagnosis: Any = HEALTHY) -> Gate:
    source = SourceLine(file="a,b:c.py", line=3, function="f", code=text)
    check = LimitCheck(limit=Limit.MIN_HEADROOM, outcome=outcome, text=text, measured=1.5, allowed=2.0, source=source)
    return Gate(outcome=outcome, checks=(check,), diagnosis=diagnosis)


class TestJunit:
    def test_a_case_for_each_check(self, overflow: Gate) -> None:
        root = ElementTree.fromstring(as_junit(overflow))
        cases = root.findall("./testsuite/testcase")
        assert [case.get("name") for case in cases] == ["verdict", "skipped steps", "new overflows", "headroom"]
        assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "4", "0")
        told = cases[0].find("failure")
        assert told is not None
        assert "+        with torch.autocast(q.device.type, enabled=False):" in (told.text or "")

    def test_what_is_not_known_is_an_error_and_what_passed_is_nothing(self) -> None:
        assert ElementTree.fromstring(as_junit(_gate(Outcome.NOT_KNOWN))).find(".//error") is not None
        assert ElementTree.fromstring(as_junit(_gate(Outcome.PASSED))).find(".//testcase/*") is None

    def test_any_text_is_well_formed(self) -> None:
        root = ElementTree.fromstring(as_junit(_gate(Outcome.FAILED, HOSTILE)))
        [failure] = root.iter("failure")
        assert "]]>&<b>" in (failure.get("message") or "")


class TestSarif:
    def test_it_is_sarif(self, overflow: Gate) -> None:
        log = Sarif.model_validate_json(as_sarif(overflow, version="1.2.3"))
        [run] = log.runs
        assert run.tool.driver.semantic_version == "1.2.3"
        ids = {rule.id for rule in run.tool.driver.rules or []}
        assert {result.rule_id for result in run.results or []} == ids
        assert "fp16_overflow" in ids

    def test_a_result_stands_at_its_line(self, overflow: Gate) -> None:
        [run] = json.loads(as_sarif(overflow, version="1"))["runs"]
        first = run["results"][0]
        place = first["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": "ampscope/demo/gpt.py"}
        assert place["region"]["startLine"] == 46
        assert first["properties"]["diff"].startswith("--- a/ampscope/demo/gpt.py")

    def test_the_fingerprint_stays_when_the_line_moves(self) -> None:
        before = _gate(Outcome.FAILED)
        moved = replace(before.checks[0], source=SourceLine(file="a,b:c.py", line=99, function="f", code="as it is"))
        prints = [
            json.loads(as_sarif(each, version="1"))["runs"][0]["results"][0]["partialFingerprints"]
            for each in (before, replace(before, checks=(moved,)))
        ]
        assert prints[0] == prints[1]

    @pytest.mark.parametrize(
        ("file", "expected"),
        [
            ("src/train me.py", "src/train%20me.py"),
            ("/home/me/train.py", "file:///home/me/train.py"),
            ("C:\\me\\train.py", "file:///C:/me/train.py"),
            ("<stdin>", "%3Cstdin%3E"),
        ],
    )
    def test_a_path_is_a_uri(self, file: str, expected: str) -> None:
        assert uri(file) == expected


class TestGithub:
    def test_an_annotation_stands_at_its_line(self, overflow: Gate) -> None:
        first = as_annotations(overflow).splitlines()[0]
        assert first.startswith("::error file=ampscope/demo/gpt.py,line=46,title=")

    def test_text_of_a_trace_cannot_begin_a_command(self) -> None:
        told = as_annotations(_gate(Outcome.FAILED, HOSTILE))
        assert told.count("\n") == 1
        assert told.startswith("::error file=a%2Cb%3Ac.py,line=3,")
        assert "%250A" in told

    def test_what_is_well_says_nothing(self) -> None:
        assert as_annotations(_gate(Outcome.PASSED)) == ""


class TestMarkdown:
    def test_a_row_for_each_check_and_the_change(self, overflow: Gate) -> None:
        text = as_markdown(overflow)
        assert "| headroom | \N{CROSS MARK} failed | 0 bits | 2 bits |" in text
        assert "```diff\n--- a/ampscope/demo/gpt.py" in text

    def test_text_of_a_trace_stays_in_its_cell(self) -> None:
        row = next(line for line in as_markdown(_gate(Outcome.FAILED, HOSTILE)).splitlines() if "headroom" in line)
        assert "\\|\\`x\\`" in row
        assert "\x1b" not in row

    def test_a_fence_is_longer_than_those_in_the_code(self) -> None:
        remedy = replace(BROKEN.incidents[1].remedies[0], diff="+x = '''```'''\n")
        item = replace(BROKEN.incidents[1], remedies=(remedy,))
        told = as_markdown(_gate(Outcome.FAILED, diagnosis=replace(BROKEN, primary=item, incidents=(item,))))
        assert "````diff\n+x = '''```'''\n````" in told


def test_the_terminal_tells_what_was_not_kept_only() -> None:
    assert "as it is" in printed(gate_text(_gate(Outcome.FAILED)))
    assert "as it is" not in printed(gate_text(_gate(Outcome.PASSED)))


class TestTheVerb:
    @pytest.fixture
    def written(self, ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
        (tmp_path / "summary.md").write_text("before\n")
        names = {"--junit": "gate.xml", "--markdown": "gate.md", "--sarif": "gate.sarif"}
        options = [part for option, name in names.items() for part in (option, tmp_path / name)]
        answer = ampscope("gate", SAMPLES / "attention-overflow", *options, "--github", "--json")
        assert answer.code == 1
        assert json.loads(answer.out)["outcome"] == "failed"
        assert answer.err.startswith("::error ")
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    def test_every_file_is_written(self, written: dict[str, str]) -> None:
        assert written["summary.md"] == "before\n" + written["gate.md"]
        assert ElementTree.fromstring(written["gate.xml"]).tag == "testsuites"
        assert json.loads(written["gate.sarif"])["version"] == "2.1.0"

    def test_exit_codes(self, ampscope: Command, tmp_path: Path) -> None:
        healthy = SAMPLES / "healthy"
        assert ampscope("gate", healthy, "--max-skipped", "1%", "--min-headroom", "2").code == 0
        assert ampscope("gate", healthy, "--min-headroom", "200").code == 1
        assert ampscope("gate", healthy, "--max-skipped", "7").code == 2
        assert ampscope("gate", healthy, "--baseline", tmp_path / "none").code == 2
        assert ampscope("gate", healthy, "--junit", tmp_path).code == 2
