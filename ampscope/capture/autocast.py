"""``ampscope.autocast``: ``torch.autocast`` under the name that goes with ``ampscope.GradScaler``."""

from __future__ import annotations

import torch


class autocast(torch.autocast):  # noqa: N801  # named as what it replaces
    """``torch.autocast``, unchanged in what it computes.

    A watched run records the autocast state of every op by itself; this name is for loops that like to say that
    they are instrumented.
    """
