"""Everything AMPscope raises.

    AmpscopeError
     +- WatchError         a call of `ampscope.watch` that cannot be honoured
     +- KeepError          a call of `ampscope.keep_fp32` that cannot be honoured
     +- TorchMissing       torch is not installed, and what was asked for trains; an ``ImportError``, too
     +- NothingToReproduce an incident whose op cannot be shown again
     +- EngineError        a query engine that cannot be had
     +- RunError           a run's folder that cannot be read
         +- RunNotFound    there is no run there
         +- RunDamaged     there is one, but a file of it cannot be read
         +- RunTooNew      it was written by a newer AMPscope
         +- RunUnreachable it lies in an object store that cannot be reached, or used

Each message says what is wrong, where, and what to do next.
"""

from __future__ import annotations


class AmpscopeError(Exception):
    """Base of every error that AMPscope raises."""


class WatchError(AmpscopeError):
    """A call of `ampscope.watch` that cannot be honoured; nothing was installed."""


class KeepError(AmpscopeError):
    """A call of `ampscope.keep_fp32` that cannot be honoured; the model is as it was."""


class TorchMissing(AmpscopeError, ImportError):
    """Torch is not installed, and what was asked for trains. Runs can be read without it."""


class NothingToReproduce(AmpscopeError):
    """There is no such incident, or the operands of its op were not kept."""


class EngineError(AmpscopeError):
    """The engine that a run is to be queried with is unknown, is not installed or cannot be started."""


class RunError(AmpscopeError):
    """A run's folder that cannot be read."""


class RunNotFound(RunError):
    """There is no run in the folder."""


class RunDamaged(RunError):
    """A file of the run cannot be read; the message names it."""


class RunTooNew(RunError):
    """The run was written with a newer trace schema than this AMPscope knows."""


class RunUnreachable(RunError):
    """The object store in which the run lies cannot be used, or does not answer."""
