"""Says what to do where no step was traced op by op."""

from __future__ import annotations

from ampscope.analysis.results import Diagnosis
from blocks.basics.text import paragraph
from blocks.basics.watch_line import watch_line


def how_to_trace(diagnosis: Diagnosis) -> None:
    """Say that nothing was traced, and which line traces a step now and then."""
    paragraph("No step of this run was traced op by op. Trace one in every so many steps:")
    watch_line(diagnosis, "every=500")
