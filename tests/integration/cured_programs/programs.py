"""Programs that are trained, diagnosed and changed in this process."""

from __future__ import annotations

import json
import linecache
import runpy
from contextlib import suppress
from typing import Any

from ampscope.capture.scope import open_scopes
from tests.support.command import Command

#: What every program begins with.
HEAD = """\
import ampscope
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
"""


def trained(run: str) -> None:
    """The program as it stands, to its end or to its error."""
    linecache.checkcache()
    with suppress(ValueError, RuntimeError, AssertionError):
        runpy.run_path("train.py", init_globals={"RUN": run})
    for scope in open_scopes():
        scope.close()


def diagnosed(ampscope: Command, run: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(ampscope("diagnose", run, "--json").out)
    return said
