"""Results of analysis on a traced step, and on two runs or steps, are kept while they are looked at."""

from __future__ import annotations

from ampscope.analysis.replay.compare.compare_results import Comparison
from ampscope.analysis.replay.compare.comparison import comparison
from ampscope.analysis.replay.compare.sides import Opened
from ampscope.analysis.replay.op_detail import with_histograms
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.replay.timeline import Lockstep, lockstep
from ampscope.analysis.results import Operand
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.trace.schema import Table
from data.run_results import grown
from data.run_snapshot import RunSnapshot, cached, identity, rows_of

#: Steps kept; one of 200,000 ops takes about 50 MB.
KEPT = 6


@cached(rows_of(Table.OPS), entries=16)
def traced_steps_of(run: RunSnapshot) -> tuple[TracedStep, ...]:
    """Returns the traced steps of the run, the newest first."""
    return traced_steps(run.run, rank=run.rank)


@cached(identity, entries=KEPT, spinner="Reading the step")
def recording_of(run: RunSnapshot, step: TracedStep) -> Recording:
    """A traced step op by op."""
    return recording(run.run, step)


@cached(identity, entries=KEPT, spinner="Comparing the steps")
def lockstep_of(run: RunSnapshot, step: TracedStep, other: TracedStep) -> Lockstep:
    """The one step against the other."""
    return lockstep(recording_of(run, step), recording_of(run, other))


@cached(identity)
def histograms_of(run: RunSnapshot, step: TracedStep, position: int) -> tuple[Operand, ...]:
    """Returns the outputs of an op with their histograms of exponents."""
    return with_histograms(run.run, recording_of(run, step), position)


@cached(grown, entries=16)
def comparison_of(one: RunSnapshot, other: RunSnapshot, step: int | None, other_step: int | None) -> Comparison:
    """Compares two runs, or a step of each, on the ranks that the snapshots look at."""
    return comparison(Opened(one.run, one.rank, step), Opened(other.run, other.rank, other_step))
