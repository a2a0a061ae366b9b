"""Operands for tests of what is shown: their own facts and their statistics named side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampscope.analysis.results import Operand
from ampscope.trace.schema import UNMEASURED, Statistics


def operand(**facts: Any) -> Operand:
    """An operand of which nothing was measured but what is given."""
    return Operand(statistics=UNMEASURED._replace(**_measured(facts)), **_own(facts))


def changed(given: Operand, **facts: Any) -> Operand:
    """An operand with other facts or other statistics."""
    return replace(given, statistics=given.statistics._replace(**_measured(facts)), **_own(facts))


def _measured(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name in Statistics._fields}


def _own(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in Statistics._fields}
