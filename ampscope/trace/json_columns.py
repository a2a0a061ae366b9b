"""Reads the columns of a trace that hold JSON: an op's scalar arguments, the evidence of an incident or finding."""

from __future__ import annotations

import json
from typing import Any


def details(text: str) -> dict[str, Any]:
    """The object that ``text`` is; empty where a damaged trace holds something else, which then says nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def names(text: str, key: str) -> tuple[str, ...]:
    """The list of texts under ``key`` of the JSON object in ``text``; empty where there is no such list."""
    found = details(text).get(key)
    return tuple(str(each) for each in found) if isinstance(found, list) else ()
