"""``ampscope report``: one file that holds everything, loads nothing and runs nothing, whoever wrote the trace."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.results import Finding, Incident
from ampscope.report.html.report_page import page, page_of
from tests.support.command import Command
from tests.support.paths import SAMPLES
from tests.support.scenes import HOSTILE, SCENES
from tests.support.trace_builder import TraceBuilder

#: Elements that have no end tag.
_VOID = {"meta", "br", "wbr"}
_TAGS = frozenset(
    {
        *("html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "h1", "h2", "h3"),
        *("p", "div", "span", "b", "i", "em", "br", "wbr", "ol", "ul", "li", "pre", "code", "details", "summary"),
        *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "path"),
    }
)
_ATTRIBUTES = frozenset(
    {
        *("class", "style", "title", "lang", "charset", "http-equiv", "content", "name", "data-column"),
        *("role", "aria-label", "aria-hidden", "viewbox", "preserveaspectratio", "d"),
    }
)


class Page(HTMLParser):
    """What a browser would make of a file: its words, and whether every element is closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    for name, make in SCENES.items():
        make(folder / name).close()
    return folder


@pytest.mark.parametrize("scene", SCENES)
def test_a_report_of_any_run_is_whole_and_runs_and_loads_nothing(scenes: Path, scene: str) -> None:
    source = page_of(scenes / scene)
    page = Page(source)
    assert page.tags <= _TAGS
    assert page.attributes <= _ATTRIBUTES
    assert "default-src 'none'" in source
    assert not re.search(r"url\(|@import|(src|href)=", source)


def test_names_from_a_trace_are_text(scenes: Path) -> None:
    source = page_of(scenes / "hostile")
    assert "<script" not in source
    assert "<b>bold" not in source
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in source
    assert HOSTILE[:30] in Page(source).text


@pytest.mark.parametrize("sample", ["attention-overflow", "clip-before-unscale"])
def test_a_report_says_what_the_diagnosis_says(sample: str) -> None:
    with ampscope.open_run(SAMPLES / sample) as run:
        diagnosis = ampscope.diagnose(run)
        text = Page(page(run, diagnosis)).text
    assert diagnosis.primary is not None
    assert what_in_words(diagnosis.primary)[1:] in text
    assert text.count(diagnosis.primary.explanation) == 1
    items: list[Incident | Finding] = [*diagnosis.incidents, *diagnosis.findings]
    for item in items:
        assert item.explanation in text
        for remedy in item.remedies:
            assert remedy.text in text
            change = [line[1:] for line in (remedy.diff or "").splitlines()[2:] if line.startswith("+")]
            assert all(" ".join(line.split()) in text for line in change or remedy.code.splitlines())


def test_a_report_shows_the_way_the_magnitudes_and_the_scale() -> None:
    text = Page(page_of(SAMPLES / "attention-overflow")).text
    for part in ("what the origin read", "blocks. 0. attention", "bmm origin", "loss reached", "and 4 inf"):
        assert part in text
    for part in ("gradient norm", "growth tracker", "It calibrated from 65,536", "Harmless, nothing to change"):
        assert part in text


def test_a_scale_that_collapsed_is_told(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "collapsed")
    for step in range(80):
        bad = step > 20
        trace.step(scale=2.0 ** (16 - bad * (step - 20)), skipped=bad, found_inf=bad)
    assert "so a smaller scale is no cure" in Page(page_of(trace.close())).text


def test_what_ran_in_which_dtype_is_told(scenes: Path) -> None:
    assert "float16 57 % float32 43 %" in Page(page_of(scenes / "healthy")).text


def test_every_optimizer_has_its_section(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "gan")
    trace.step(optimizer=0)
    trace.step(optimizer=1, scale=64.0)
    text = Page(page_of(trace.close())).text
    assert "The loss scale of optimizer 0" in text
    assert "The loss scale of optimizer 1" in text


class TestVerb:
    def test_writes_the_file_and_says_so(self, ampscope: Command, scenes: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.html"
        answer = ampscope("report", scenes / "overflow", "-o", out)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"Wrote {out} (")
        assert out.read_text("utf-8") == page_of(scenes / "overflow")
        assert [path.name for path in tmp_path.iterdir()] == ["out.html"]

    def test_keeps_a_file_that_exists_unless_told(self, ampscope: Command, scenes: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.html"
        out.write_text("mine")
        answer = ampscope("report", scenes / "empty", "-o", out)
        assert answer.code == 2
        assert "--force" in answer.err
        assert out.read_text() == "mine"
        assert ampscope("report", scenes / "empty", "-o", out, "--force").code == 0
        assert out.read_text("utf-8").startswith("<!doctype html>")

    def test_a_place_that_takes_no_file_is_one_line(self, ampscope: Command, scenes: Path, tmp_path: Path) -> None:
        for out in (tmp_path, tmp_path / "no" / "such.html"):
            answer = ampscope("report", scenes / "empty", "-o", out, "--force")
            assert (answer.code, answer.out) == (2, "")
            assert answer.err.startswith(f"ampscope: cannot write {out}: ")
            assert answer.err.count("\n") == 1

    def test_a_run_that_is_not_there_leaves_no_file(self, ampscope: Command, tmp_path: Path) -> None:
        answer = ampscope("report", tmp_path / "none", "-o", tmp_path / "out.html")
        assert answer.code == 2
        assert list(tmp_path.iterdir()) == []
