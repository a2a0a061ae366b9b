"""``ampscope.autocast`` and ``ampscope.GradScaler``: torch's own, for loops that like to say that they are watched."""

from __future__ import annotations

import torch


class autocast(torch.autocast):  # noqa: N801  # named as what it replaces
    """``torch.autocast``, unchanged in what it computes.

    A watched run records the autocast state of every op by itself; this name is for loops that like to say that
    they are instrumented.
    """


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, noticed by every open scope as soon as it scales a loss.

    Args and behaviour are those of ``torch.amp.GradScaler``; `ampscope.watch` gives it (as any other scaler) its
    instrumented form.
    """
