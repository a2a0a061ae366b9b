from __future__ import annotations

import pytest

from tests.support.page_reading import Shown, address
from tests.unit.app.conftest import Show


def links(shown: Shown) -> dict[str, str]:
    """The query of each link on the page, by its label."""
    return {one.proto.label: one.proto.query_string for one in shown.test.get("page_link")}


def go(shown: Shown, page: str, query: str = "") -> Shown:
    """To another page, as the side bar does, which drops the address, or as a link does, which sets it."""
    shown.test.query_params.clear()
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        shown.test.query_params[name] = value
    return Shown(shown.test.switch_page(f"app_pages/{page}.py").run())


def test_the_verdict_leads_to_the_incident_the_incident_to_its_op_and_the_op_to_scale_and_precision(show: Show) -> None:
    shown = show("overflow")
    shown = go(shown, "incident", next(query for label, query in links(shown).items() if "closely" in label))
    assert address(shown)["incident"].startswith("260-")
    shown = go(shown, "replay", links(shown)["Replay the step from its origin"])
    assert (address(shown)["step"], address(shown)["source"]) == ("260", "replay")
    onward = links(shown)
    assert onward["Incident"].endswith(f"incident={address(go(shown, 'incident'))['incident']}")
    shown = go(shown, "scale", onward["Loss scale at this step"])
    assert "At step 260" in shown.words
    shown = go(shown, "precision", onward["Precision of this module"])
    assert "only blocks.3.attn and what is in it" in shown.words
    assert address(shown)["step"] == "260"
    assert "op=" in links(shown)["Replay from its first op"]


def test_every_link_keeps_the_run(show: Show) -> None:
    for page in ("overview", "incident", "replay", "scale", "precision"):
        for label, query in links(show("overflow", page, step="260")).items():
            assert "run=overflow" in query, label


def test_the_side_bar_drops_the_address_and_the_step_stays_in_mind(show: Show) -> None:
    shown = show("overflow", "replay", step="260", op="7")
    shown = go(shown, "scale")
    assert "At step 260" in shown.words
    assert address(shown)["step"] == "260"
    shown = go(shown, "replay")
    assert address(shown)["op"] == "7"


def test_the_incident_that_was_looked_at_decides_the_step_of_the_other_pages(show: Show) -> None:
    shown = show("overflow", "incident", incident="0-benign_initial_calibration")
    assert "At step 0" in go(shown, "scale").words


def test_another_run_starts_another_story(show: Show) -> None:
    shown = show("overflow", "replay", step="260", op="7")
    shown.test.selectbox(key="run").set_value("healthy").run()
    assert address(shown)["step"] == "100"
    assert "there is no" not in shown.words + shown.side


def test_a_step_on_the_scale_page_is_marked_and_told(show: Show) -> None:
    shown = show("overflow", "scale", step="264")
    assert "At step 264" in shown.words
    assert "skipped optimizer step" in " ".join(shown.words.split())
    assert "step 264" in shown.figures[0]


@pytest.mark.parametrize("asked", ["5000", "minus one", "<b>x</b>"])
def test_a_step_that_is_not_there_is_said_and_dropped(show: Show, asked: str) -> None:
    shown = show("overflow", "scale", step=asked)
    assert f"there is no {asked} here; this is the whole run" in shown.words
    assert "step" not in address(shown)
    assert "<b>x</b>" not in "".join(shown.raw)


def test_a_mark_can_be_taken_away(show: Show) -> None:
    shown = show("overflow", "scale", step="264")
    (close,) = [button for button in shown.test.button if button.label == "Show no step"]
    shown = Shown(close.click().run())
    assert "At step" not in shown.words
    assert "step" not in address(shown)


def test_a_module_that_is_not_there_is_said_and_all_are_shown(show: Show) -> None:
    shown = show("healthy", "precision", module="<b>nowhere</b>")
    assert "there is no <b>nowhere</b> here; this is the whole model" in shown.words
    assert "<b>nowhere</b>" not in "".join(shown.raw)
    assert '"amp-share-name">blocks.3' in "".join(shown.raw)


def test_pages_stand_in_the_order_in_which_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.paths import APP

    monkeypatch.syspath_prepend(APP)
    from state.pages import Page

    assert [page.title for page in Page] == ["Overview", "Incident", "Replay", "Scale", "Precision", "Usage", "Runs"]
