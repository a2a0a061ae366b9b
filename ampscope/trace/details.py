"""Reads the columns of a trace that hold JSON: an op's scalar arguments, the evidence of an incident or finding."""

from __future__ import annotations

import json
from typing import Any


def details(text: str) -> dict[str, Any]:
    """The object that ``text`` is; empty where a damaged trace holds something else, which then says nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
