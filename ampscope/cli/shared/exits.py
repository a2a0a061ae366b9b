"""The exit codes of ``ampscope``."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The exit codes, by which a script learns how a call ended."""

    HEALTHY = 0
    AT_RISK = 0  #: 1 where it was asked for with ``--strict``
    PROBLEM = 1
    PARTLY_OBSERVED = 2  #: nothing is wrong in what was looked at, which is not all that should have been
    NOT_OBSERVED = 2  #: the run shows nothing that would allow a verdict
    FAILED = 2  #: it could not be read or done; one line on standard error says why


#: Of what is checked: the values of an `ampscope.analysis.diagnosis.gate.Outcome`.
OF_OUTCOMES = {"passed": Exit.HEALTHY, "failed": Exit.PROBLEM, "not_known": Exit.NOT_OBSERVED}
