"""Everything AMPscope raises.

    AmpscopeError
     +- WatchError         a call of `ampscope.watch` that cannot be honoured
     +- KeepError          a call of `ampscope.keep_fp32` that cannot be honoured
     +- NothingToReproduce an incident whose op cannot be shown again
     +- RunError           a run's folder that cannot be read
         +- RunNotFound    there is no run there
         +- RunDamaged     there is one, but a file of it cannot be read
         +- RunTooNew      it was written by a newer AMPscope

Each message says what is wrong, where, and what to do next.
"""

from __future__ import annotations


class AmpscopeError(Exception):
    """Base of every error that AMPscope raises."""


class WatchError(AmpscopeError):
    """A call of `ampscope.watch` that cannot be honoured; nothing was installed."""


class KeepError(AmpscopeError):
    """A call of `ampscope.keep_fp32` that cannot be honoured; the model is as it was."""


class NothingToReproduce(AmpscopeError):
    """There is no such incident, or the operands of its op were not kept."""


class RunError(AmpscopeError):
    """A run's folder that cannot be read."""


class RunNotFound(RunError):
    """There is no run in the folder."""


class RunDamaged(RunError):
    """A file of the run cannot be read; the message names it."""


class RunTooNew(RunError):
    """The run was written with a newer trace schema than this AMPscope knows."""
