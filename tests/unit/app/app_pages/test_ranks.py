from __future__ import annotations

from tests.support.page_reading import Show, Shown
from tests.support.scenes import BAD_STEP


def test_the_page_says_where_it_began_and_who_received_it(seen: Show) -> None:
    shown = seen("ranks", "ranks", real=True)
    words = shown.words
    assert "3 of 4 ranks are in this trace." in words
    assert "it began on rank 1; ranks 0 and 2 received it." in words
    assert "Rank 2 differs from the 2 others in the gradient norm at 30 steps, first at step 50." in words
    assert "not in this trace" in words
    assert any("amp-grid" in body and 'class="origin"' in body for body in shown.raw)


def chosen_rank(shown: Shown) -> object:
    return shown.test.button_group(key="rank").value


def test_a_page_opens_on_the_rank_of_the_primary_incident(seen: Show) -> None:
    for page in ("overview", "scale"):
        assert chosen_rank(seen("ranks", page, real=True)) == "1", page


def test_its_links_name_the_rank(seen: Show) -> None:
    links = seen("ranks", "ranks", real=True).links
    assert "rank=1" in links[f"Replay step {BAD_STEP} of rank 1"]
    assert "rank=1" in links["The incident on rank 1"]


def test_a_run_of_one_rank_has_no_ranks_to_compare(seen: Show) -> None:
    shown = seen("healthy", "ranks")
    assert "This run has one rank" in shown.words
    assert not shown.test.button_group


def test_every_page_of_one_rank_offers_those_that_are_there(seen: Show) -> None:
    assert not seen("ranks", "ranks", real=True).test.button_group  # which shows all of them at once
    for page in ("overview", "replay", "scale", "precision", "usage"):
        (box,) = [box for box in seen("ranks", page, real=True).test.button_group if box.key == "rank"]
        assert box.options == ["Rank 0", "Rank 1", "Rank 2"], page


def test_replay_it_opens_the_step_of_the_rank_where_it_began(seen: Show) -> None:
    shown = seen("ranks", real=True)
    assert "on rank 1 of 4" in shown.words
    query = shown.links["Replay it"]
    assert "rank=1" in query
    assert f"step={BAD_STEP}" in query
    there = seen("ranks", "replay", real=True, rank="1", step=str(BAD_STEP), source="replay")
    assert there.address["rank"] == "1"
    assert "aten.mul.Tensor" in there.words or "mul" in there.words
    assert "inf" in there.words


def test_the_page_after_an_incident_looks_at_its_rank(show: Show) -> None:
    shown = show("ranks", "incident", real=True)
    assert "step 40 on rank 1 of 4" in shown.words
    shown.test.query_params.clear()  # as the side bar does
    shown.test.switch_page("app_pages/replay.py").run()
    assert chosen_rank(shown) == "1"
    assert str(shown.test.selectbox(key="traced").value).startswith(f"{BAD_STEP}-")


def test_a_page_shows_the_rank_that_was_chosen(seen: Show) -> None:
    own, other = (seen("ranks", "overview", real=True, rank=rank) for rank in ("0", "1"))
    assert "▲ NaN or infinite" not in own.figures[0].split('"loss"')[0]
    assert own.figures != other.figures
    assert other.address["rank"] == "1"


def test_an_address_with_a_rank_that_is_not_there_says_so(seen: Show) -> None:
    shown = seen("ranks", "scale", real=True, rank="3")
    assert "there is no 3 here; this is Rank 1" in shown.words


def test_another_run_begins_at_its_own_first_rank(show: Show) -> None:
    shown = show("ranks", "scale", real=True, rank="2")
    shown.test.selectbox(key="run").set_value("healthy").run()
    assert "rank" not in shown.test.query_params
