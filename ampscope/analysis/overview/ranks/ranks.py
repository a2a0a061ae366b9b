"""All ranks of a run at a glance: where it went wrong first, who received it, who lags, who computes something else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ampscope.analysis.overview.ranks.bad_steps import BadStep, bad_steps
from ampscope.analysis.overview.ranks.rank_states import Life, RankState, rank_states
from ampscope.analysis.overview.ranks.replicas import Replicas, replicas
from ampscope.analysis.overview.ranks.sightings import sightings
from ampscope.analysis.overview.ranks.step_grid import StepGrid, step_grid
from ampscope.analysis.overview.ranks.steps_by_rank import steps_by_rank
from ampscope.analysis.overview.ranks.world import World, world_of
from ampscope.analysis.overview.ranks.written_steps import written_steps
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(NotebookRepr):
    """The ranks of a run."""

    world: World = field(default_factory=World)
    states: tuple[RankState, ...] = ()  #: every rank, those that are missing among them
    bad: tuple[BadStep, ...] = ()  #: the first first
    replicas: Replicas = field(default_factory=Replicas)
    grid: StepGrid = field(default_factory=StepGrid)

    def of_life(self, life: Life) -> tuple[int, ...]:
        """The ranks that are so."""
        return tuple(state.rank for state in self.states if state.life is life)

    @property
    def lagging(self) -> tuple[RankState, ...]:
        """Ranks that recorded fewer steps than the one that came furthest, the last first."""
        behind = [state for state in self.states if (state.behind or 0) > 1]
        return tuple(sorted(behind, key=lambda state: (-(state.behind or 0), state.rank)))


def ranks_at_a_glance(run: Run) -> Ranks:
    """The ranks of ``run`` with the picture of all their steps; of one that has none yet, an empty one."""
    seen = ranks_in_numbers(run)
    return replace(seen, grid=step_grid(run, seen.world, seen.bad, seen.replicas.apart))


def ranks_in_numbers(run: Run) -> Ranks:
    """`ranks_at_a_glance` without the picture."""
    world = world_of(run)
    last = {rank: steps.last for rank, steps in steps_by_rank(run).items()}
    bad = bad_steps(sightings(run), last, world.size, written_steps(run))
    return Ranks(world=world, states=rank_states(run, world, bad), bad=tuple(bad), replicas=replicas(run))
