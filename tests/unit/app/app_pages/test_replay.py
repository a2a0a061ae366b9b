from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_reading import Show, Shown
from tests.support.scenes import HOSTILE, LONG
from tests.support.trace_builder import TraceBuilder


def press(shown: Shown, key: str) -> Shown:
    return Shown(shown.test.button(key=f"replay-{key}").click().run())


def lists(shown: Shown) -> list[list[dict[str, Any]]]:
    """The rows of each list on the page."""
    return [json.loads(one.proto.json)["rows"] for one in shown.test.get("bidi_component") if one.proto.json]


def test_the_cursor_starts_at_the_origin_of_the_incident(show: Show) -> None:
    shown = show("overflow", "replay")
    assert shown.test.selectbox(key="traced").value == "260-replay"
    assert shown.address["op"] == "20"
    assert "aten.bmm.default" in shown.words
    assert "/home/me/gpt/model.py:34" in shown.words


def test_buttons_move_the_cursor_and_the_address_follows(show: Show) -> None:
    shown = show("overflow", "replay", step="260", op="0")
    assert shown.address["op"] == "0"
    assert press(shown, "on").address["op"] == "1"
    assert press(shown, "T").address["op"] == "3"
    assert press(shown, "T").address["op"] == "9"
    assert press(shown, "back").address["op"] == "8"
    assert press(shown, "last").address["op"] == "24"
    assert press(shown, "T").address["op"] == "3"
    assert press(shown, "first").address["op"] == "0"
    assert "op 1 of 25" in " ".join(shown.words.split())


def test_a_jump_that_leads_nowhere_is_off(show: Show) -> None:
    shown = show("overflow", "replay")
    assert shown.test.button(key="replay-N").disabled
    assert not shown.test.button(key="replay-M").disabled


def test_playing_goes_on_by_itself_and_the_same_button_stops_it(show: Show) -> None:
    shown = press(show("overflow", "replay", op="0"), "play")
    assert shown.test.button(key="replay-play").label == "Pause"
    assert "op 1 of 25" not in " ".join(shown.words.split())
    shown = press(shown, "play")
    assert shown.test.button(key="replay-play").label == "Play"


def test_playing_ends_at_the_last_op(show: Show) -> None:
    shown = press(show("overflow", "replay", op="23"), "play")
    for _ in range(2):
        shown.test.run()
    assert shown.test.button(key="replay-play").label == "Play"
    assert shown.address["op"] == "24"


@pytest.mark.parametrize(("asked", "told"), [("999", "number 999"), ("-1", "number -1"), ("<b>x</b>", "<b>x</b>")])
def test_an_op_that_is_not_there_is_said_and_replaced(show: Show, asked: str, told: str) -> None:
    shown = show("overflow", "replay", step="260", op=asked)
    assert f"there is no {told}" in shown.words or f"there is no number {told}" in shown.words
    assert shown.address["op"] in ("20", "24")
    assert "<b>x</b>" not in "".join(shown.raw)


@pytest.mark.parametrize("asked", ["9", "x", "99999999999999999999", "<b>x</b>"])
def test_a_step_that_was_not_traced_is_said_and_replaced(show: Show, asked: str) -> None:
    shown = show("overflow", "replay", step=asked)
    assert f"there is no step {asked} here" in shown.words
    assert shown.address["step"] == "260"
    assert "<b>x</b>" not in "".join(shown.raw)


def test_the_list_and_the_tree_show_the_surroundings(show: Show) -> None:
    ops, tree, *_ = lists(show("overflow", "replay"))
    (current,) = [row for row in ops if "current" in row["kind"]]
    assert (current["lead"], current["text"], current["note"]) == ("20", "bmm", "attn")
    assert [row["text"] for row in tree] == ["blocks", "0", "1", "2", "3", "norm", "attn", "qkv", "outside modules"]
    assert [row["depth"] for row in tree] == [0, 1, 1, 1, 1, 2, 2, 3, 0]


def test_a_search_narrows_the_list_and_leads_from_match_to_match(show: Show) -> None:
    shown = show("overflow", "replay", op="0")
    shown = Shown(shown.test.text_input(key="replay-find").set_value("blocks.2 SOFTMAX").run())
    ops, *_ = lists(shown)
    assert [row["lead"] for row in ops] == ["15", "16"]  # the cast for it stands on the same line
    assert press(shown, "F").address["op"] == "15"
    shown = Shown(shown.test.text_input(key="replay-find").set_value("no such op").run())
    assert "No op of this step has all of these words" in shown.words


def test_hostile_names_reach_lists_as_bounded_text(show: Show) -> None:
    for rows in lists(show("hostile", "replay")):
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
    shown = press(shown, "D")
    assert shown.address["op"] == "1"
    assert "a factor of 2 or more apart" in shown.words
    assert "differs" in shown.figures[0]
    assert shown.address["against"] == "0-replay"


def test_nothing_to_compare_with_leaves_the_address_alone(show: Show) -> None:
    assert "against" not in show("overflow", "replay").address


def test_a_long_name_in_the_address_of_another_run_does_no_harm(show: Show) -> None:
    shown = show("overflow", "replay", against=LONG, source=HOSTILE)
    assert "there is no" in shown.words
    assert "<script" not in "".join(shown.raw)
