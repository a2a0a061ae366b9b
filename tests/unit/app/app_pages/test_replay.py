from __future__ import annotations

import json
import math
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from tests.support.page_reading import Show, Shown
from tests.support.scenes import HOSTILE, LONG
from tests.support.trace_builder import TraceBuilder


def told(shown: Shown) -> list[dict[str, Any]]:
    """What the lists and the track's cursor on the page are told."""
    return [json.loads(one.proto.json) for one in shown.test.get("bidi_component") if one.proto.json]


def lists(shown: Shown) -> list[list[dict[str, Any]]]:
    """The rows of each list on the page."""
    return [one["rows"] for one in told(shown) if "rows" in one and "folds" not in one]


def cursor(shown: Shown) -> dict[str, Any]:
    """Where the track is told to be."""
    (found,) = [one for one in told(shown) if "moves" in one]
    return found


def track(shown: Shown) -> tuple[dict[str, Any], bytes]:
    """What the browser is sent of the step, read and as it is."""
    (raw,) = [one.proto.bytes for one in shown.test.get("bidi_component") if one.proto.bytes]
    body = zlib.decompress(raw[2:])
    found: dict[str, Any] = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return found, raw


def test_the_cursor_starts_at_the_origin_of_the_incident(seen: Show) -> None:
    shown = seen("overflow", "replay")
    assert shown.test.selectbox(key="traced").value == "260-replay"
    assert "op number 20" in shown.words
    assert "op" not in shown.address  # what a page begins with by itself is no step back
    assert "aten.bmm.default" in shown.words
    assert "/home/me/gpt/model.py:34" in shown.words


def test_the_track_is_told_where_the_cursor_is_and_is_sent_the_same_step(seen: Show) -> None:
    shown = seen("overflow", "replay", step="260", op="3")
    assert cursor(shown)["at"] == 3
    assert cursor(shown)["step"] == track(shown)[0]["name"]
    later = seen("overflow", "replay", step="260", op="8")
    assert cursor(later)["at"] == 8
    assert cursor(later)["found"] is None
    assert track(later)[1] == track(shown)[1]


def test_the_figure_is_a_sentence_for_those_who_do_not_see_it(seen: Show) -> None:
    label = track(seen("overflow", "replay"))[0]["label"]
    assert label.startswith("Step 260, replayed: 25 ops in the order in which they ran, by headroom")
    assert "Arrow keys choose an op" in label


@pytest.mark.parametrize(("asked", "words"), [("999", "number 999"), ("-1", "number -1"), ("<b>x</b>", "<b>x</b>")])
def test_an_op_that_is_not_there_is_said_and_replaced(seen: Show, asked: str, words: str) -> None:
    shown = seen("overflow", "replay", step="260", op=asked)
    assert f"there is no {words}" in shown.words or f"there is no number {words}" in shown.words
    assert shown.address["op"] in ("20", "24")
    assert "<b>x</b>" not in "".join(shown.raw)


@pytest.mark.parametrize("asked", ["9", "x", "99999999999999999999", "<b>x</b>"])
def test_a_step_that_was_not_traced_is_said_and_replaced(seen: Show, asked: str) -> None:
    shown = seen("overflow", "replay", step=asked)
    assert f"there is no step {asked} here" in shown.words
    assert shown.address["step"] == "260"
    assert "<b>x</b>" not in "".join(shown.raw)


def test_the_list_shows_the_surroundings(seen: Show) -> None:
    ops = max(lists(seen("overflow", "replay")), key=len)
    (current,) = [row for row in ops if "current" in row["kind"]]
    assert (current["lead"], current["text"], current["note"]) == ("20", "bmm", "attn")


def test_a_search_narrows_the_list_and_is_shown_on_the_track(show: Show) -> None:
    shown = show("overflow", "replay", op="0")
    shown = Shown(shown.test.text_input(key="replay-find").set_value("blocks.2 SOFTMAX").run())
    assert ["15", "16"] in [[row["lead"] for row in rows] for rows in lists(shown)]  # the cast for it is on its line
    bits = np.frombuffer(zlib.decompress(b64decode(cursor(shown)["found"])), np.uint8)
    assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == [15, 16]
    shown = Shown(shown.test.text_input(key="replay-find").set_value("no such op").run())
    assert "No op of this step has all of these words" in shown.words


def test_what_an_op_read_is_a_link_to_where_that_was_written(seen: Show) -> None:
    listed = lists(seen("overflow", "replay", op="16"))
    (read,) = [row for rows in listed for row in rows if row["href"]]
    way = urlsplit(read["href"])
    assert (read["lead"], way.path) == ("15", "replay")
    asked = {name: values[0] for name, values in parse_qs(way.query).items()}
    assert (asked["op"], asked["step"], asked["source"]) == ("15", "260", "replay")


def test_hostile_names_reach_lists_as_bounded_text(seen: Show) -> None:
    for rows in lists(seen("hostile", "replay")):
        for row in rows:
            assert len(row["text"]) <= 80
            assert len(row["hint"]) <= 200
            assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in json.dumps(row, ensure_ascii=False)


def test_two_steps_go_in_lockstep(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "pair")
    sites = [trace.site(f"aten.{name}.default") for name in ("a", "b", "c")]
    for step, largest in ((0, 1.0), (1, 8.0)):
        trace.step(traced="replay")
        for site in sites:
            high = largest if site == sites[1] else 1.0
            trace.op(site, step=step, max=high, max_finite=high)
    trace.close()
    shown = show("pair", "replay", step="1", op="0", against="0-replay")
    assert "the first op whose values differ is number 1, aten.b.default in fc" in shown.words
    assert "Both gave the same" in shown.words
    assert track(shown)[0]["parted"] == 1
    assert "1 differ" in track(shown)[0]["label"]
    shown = show("pair", "replay", step="1", op="1", against="0-replay")
    assert "a factor of 2 or more apart" in shown.words
    assert shown.address["against"] == "0-replay"
    assert track(show("pair", "replay", step="1", op="1", against="none"))[0]["lanes"]["other"] == 0


def test_infinities_that_differ_are_told_apart(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "pair")
    site = trace.site("aten.a.default")
    for step, low in ((0, -4.0), (1, -8.0), (2, math.nan)):
        trace.step(traced="replay")
        trace.op(site, step=step, min=low, max=math.inf if low < 0 else low)
    trace.close()
    for against in ("0-replay", "2-replay"):
        words = show("pair", "replay", step="1", op="0", against=against).words
        assert "Both gave values that are not finite, and not the same ones." in words
        assert "Both gave the same" not in words


def test_nothing_to_compare_with_leaves_the_address_alone(seen: Show) -> None:
    assert "against" not in seen("overflow", "replay").address


def test_a_long_name_in_the_address_of_another_run_does_no_harm(seen: Show) -> None:
    shown = seen("overflow", "replay", against=LONG, source=HOSTILE)
    assert "there is no" in shown.words
    assert "<script" not in "".join(shown.raw)
