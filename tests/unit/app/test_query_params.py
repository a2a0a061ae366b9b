"""What the reader looks at goes with them from page to page and from link to link."""

from __future__ import annotations

from tests.support.page_reading import Show, Shown


def go(shown: Shown, page: str, query: str = "") -> Shown:
    """To another page, as the side bar does, which drops the address, or as a link does, which sets it."""
    shown.test.query_params.clear()
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        shown.test.query_params[name] = value
    return Shown(shown.test.switch_page(f"app_pages/{page}.py").run())


def test_the_verdict_leads_to_the_incident_the_incident_to_its_op_and_the_op_to_scale_and_precision(show: Show) -> None:
    shown = show("overflow")
    shown = go(shown, "incident", next(query for label, query in shown.links.items() if "closely" in label))
    assert shown.address["incident"].startswith("260-")
    shown = go(shown, "replay", shown.links["Replay the step from its origin"])
    assert (shown.address["step"], shown.address["source"]) == ("260", "replay")
    onward = shown.links
    assert onward["Incident"].endswith(f"incident={go(shown, 'incident').test.selectbox(key='incident').value}")
    shown = go(shown, "scale", onward["Loss scale at this step"])
    assert "At step 260" in shown.words
    shown = go(shown, "precision", onward["Precision of this module"])
    assert "only blocks.3.attn and what is in it" in shown.words
    assert shown.address["step"] == "260"
    assert "op=" in shown.links["Replay from its first op"]


def test_the_side_bar_drops_the_address_and_the_step_is_remembered(show: Show) -> None:
    shown = show("overflow", "replay", step="260", op="7")
    shown = go(shown, "scale")
    assert "At step 260" in shown.words
    assert shown.address["step"] == "260"
    shown = go(shown, "replay")
    assert shown.address["op"] == "7"


def test_the_incident_that_was_looked_at_decides_the_step_of_the_other_pages(show: Show) -> None:
    shown = show("overflow", "incident", incident="0-benign_initial_calibration")
    assert "At step 0" in go(shown, "scale").words


def test_nothing_is_remembered_of_another_run(show: Show) -> None:
    shown = show("overflow", "replay", step="260", op="7")
    shown.test.selectbox(key="run").set_value("healthy").run()
    assert str(shown.test.selectbox(key="traced").value).startswith("100-")
    assert "there is no" not in shown.words + shown.side


def test_a_page_leaves_what_it_begins_with_out_of_the_address(show: Show) -> None:
    """Each writing would be an entry of the browser's history, to which Back leads first."""
    for page in ("precision", "incident", "plan", "ranges", "scale"):
        assert show("overflow", page).address.keys() <= {"run"}, page


def test_what_a_link_names_stays_in_the_address(show: Show) -> None:
    asked = {"run": "overflow", "step": "260", "source": "replay", "depth": "1", "measure": "ops"}
    shown = show(**asked, page="precision")
    assert shown.address == asked


def test_back_takes_a_choice_back(show: Show) -> None:
    shown = show("overflow", "precision")
    before = dict(shown.address)
    shown = Shown(shown.test.selectbox(key="measure").set_value("bytes").run())
    assert shown.address == before | {"measure": "bytes"}
    del shown.test.query_params["measure"]  # as Back does
    shown = Shown(shown.test.run())
    assert shown.test.selectbox(key="measure").value == "ops"
    assert shown.address == before
