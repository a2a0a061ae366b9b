"""What is amiss with an archive is found; `make dist` looks at those that are released."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.support.paths import ROOT

CONTENTS: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "release" / "contents.py"))
WHEEL = [*CONTENTS["NEEDED"], "ampscope-0.1.0.dist-info/RECORD"]


def test_a_wheel_as_it_should_be() -> None:
    assert list(CONTENTS["wrong_in_wheel"](WHEEL)) == []


@pytest.mark.parametrize("name", CONTENTS["NEEDED"])
def test_what_a_wheel_lacks(name: str) -> None:
    assert list(CONTENTS["wrong_in_wheel"]([each for each in WHEEL if each != name])) == [f"{name} is missing"]


@pytest.mark.parametrize(
    "name",
    ["tests/test_architecture.py", "ampscope/__pycache__/errors.cpython-311.pyc", "ampscope/_app/.venv/pyvenv.cfg"],
)
def test_what_a_wheel_should_not_hold(name: str) -> None:
    assert list(CONTENTS["wrong_in_wheel"]([*WHEEL, name]))


def test_an_sdist_holds_what_git_knows() -> None:
    wrong = CONTENTS["wrong_in_sdist"]
    assert list(wrong(["README.md", "PKG-INFO"], ["README.md"])) == []
    assert list(wrong(["PKG-INFO"], ["README.md"])) == ["README.md is missing"]
    assert list(wrong(["a/__pycache__/b.pyc"], [])) == ["a/__pycache__/b.pyc is a leftover"]


def test_two_wheels_that_differ() -> None:
    assert CONTENTS["different"]({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b", "c"]
    assert CONTENTS["different"]({"a": 1}, {"a": 1}) == []
