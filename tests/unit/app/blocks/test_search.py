from __future__ import annotations

import json
from typing import Any

from tests.support.page_reading import Show, Shown


def offered(shown: Shown) -> dict[str, Any]:
    """What the search offers before anything is typed, by group."""
    told = [json.loads(one.proto.json) for one in shown.test.get("bidi_component") if '"groups"' in one.proto.json]
    return {group["title"]: group for group in told[0]["groups"]}


def test_it_offers_what_was_noticed_the_pages_and_commands(seen: Show) -> None:
    groups = offered(seen("overflow", "scale"))
    assert list(groups) == ["Noticed", "Pages", "Commands"]
    assert "Ranks" not in [offer["text"] for offer in groups["Pages"]["offers"]]
    assert "Copy link to this page" in [offer["text"] for offer in groups["Commands"]["offers"]]


def test_what_it_offers_keeps_the_run_and_the_rank(seen: Show) -> None:
    groups = offered(seen("ranks", "scale", real=True, rank="2"))
    addresses = [offer["go"] for offer in groups["Pages"]["offers"]]
    assert "ranks?run=ranks&rank=2" in addresses
    assert all("run=ranks" in address and "rank=2" in address for address in addresses)
