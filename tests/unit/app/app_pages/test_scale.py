from __future__ import annotations

import pytest

from tests.support.page_reading import Show, Shown


def test_the_history_stands_in_sentences_and_with_its_lines(seen: Show) -> None:
    words = seen("healthy", "scale").words
    assert "As far as skipped steps tell, " in words
    assert "It calibrated from 65,536 (2¹⁶) to 8,192 (2¹³) in 3 skipped steps." in words
    assert "multiplies by 2 after 200 good steps in a row, by 0.5 after a skipped step" in words
    assert "train.py:61" in words
    assert "unscale_ called 400 0 to 399 train.py:58" in " ".join(words.split())


def test_a_run_without_a_scaler_says_so(seen: Show) -> None:
    shown = seen("finding", "scale")
    assert "No step of this run used a loss scale" in shown.words
    assert "Back to the overview" in shown.links


def test_nothing_leads_to_a_loss_scale_that_is_not_there(show: Show) -> None:
    label = "The loss scale at this step"
    assert [label in show(run, "incident").links for run in ("finding", "overflow")] == [False, True]


def test_the_simulator_answers_when_a_slider_moves(show: Show) -> None:
    shown = show("healthy", "scale")
    assert "Move a slider" in shown.words
    (initial,) = (one for one in shown.test.select_slider if one.label == "Initial scale")
    initial.set_value(8192.0).run()
    again = Shown(shown.test)
    assert "0 steps would have been skipped; 3 steps were." in " ".join(again.words.split())
    assert "init_scale=8192" in again.words
    linked = show("healthy", "scale", init_scale="8192")
    assert "0 steps would have been skipped; 3 steps were." in " ".join(linked.words.split())
    assert "Move a slider" in show("healthy", "scale", init_scale="a lot").words


def test_a_step_on_the_scale_page_is_marked_and_described(seen: Show) -> None:
    shown = seen("overflow", "scale", step="264")
    assert "At step 264" in shown.words
    assert "skipped optimizer step" in " ".join(shown.words.split())
    assert "step 264" in shown.figures[0]


@pytest.mark.parametrize("asked", ["5000", "minus one", "<b>x</b>"])
def test_a_step_that_is_not_there_is_said_and_dropped(seen: Show, asked: str) -> None:
    shown = seen("overflow", "scale", step=asked)
    assert f"there is no {asked} here; this is the whole run" in shown.words
    assert "step" not in shown.address
    assert "<b>x</b>" not in "".join(shown.raw)


def test_a_mark_can_be_taken_away(show: Show) -> None:
    shown = show("overflow", "scale", step="264")
    (close,) = [button for button in shown.test.button if button.label == "Show no step"]
    shown = Shown(close.click().run())
    assert "At step" not in shown.words
    assert "step" not in shown.address


@pytest.mark.parametrize(
    ("asked", "is_shown"),
    [("100-200", True), ("200-100", False), ("9000-9001", False), ("<b>-1", False), ("1-2-3", False)],
)
def test_the_steps_that_the_address_asks_for_are_shown_where_there_are_any(
    seen: Show, asked: str, is_shown: bool
) -> None:
    (figure,) = seen("overflow", "scale", range=asked).figures
    assert ('"range":[100,200]' in figure.replace(" ", "")) is is_shown
    assert "<b>" not in figure
