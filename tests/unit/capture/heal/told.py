"""What a run's events say of its healing."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

import ampscope
from ampscope.trace.schema import EventKind, Table


def write(code: str, model: nn.Module) -> None:
    """Does what the code of a change says, as whoever pastes it into a loop."""
    exec(code, {"ampscope": ampscope, "torch": torch, "model": model})  # noqa: S102  # printed


def cures(scope: ampscope.Scope, kind: EventKind = EventKind.CURE) -> list[dict[str, Any]]:
    """The changes that a run has made, or taken back, when it is closed."""
    scope.close()
    rows = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=kind)
    return [{"step": row.step, **json.loads(row.text)} for row in rows]
