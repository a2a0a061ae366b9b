"""Names in a row and counted nouns, as every sentence has them."""

from __future__ import annotations

import pytest

from ampscope.analysis.words import counted, listed


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more module"),
        (["a", "b", "c", *"d" * 1000], "a, b, c and 1,000 more modules"),
    ],
)
def test_of_many_names_the_first_are_told(names: list[str], told: str) -> None:
    assert listed(names, 3, "module") == told


def test_all_names_are_told_where_no_most_is_given() -> None:
    assert listed(["a", "b", "c", "d"]) == "a, b, c and d"
    assert listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"


@pytest.mark.parametrize(
    ("number", "one", "told"),
    [(1, "op", "1 op"), (1000, "op", "1,000 ops"), (2, "batch", "2 batches"), (4, "kind of op", "4 kinds of op")],
)
def test_a_noun_is_counted(number: int, one: str, told: str) -> None:
    assert counted(number, one) == told
