"""A running average in half precision that never moves is rounded away, unless it has come to its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.changes.replay_change import EverythingIn
from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.loop_state.gap_replay import Closeup, Closeups, Names, wide
from ampscope.capture.loop_state.loop_calls import Gap
from ampscope.capture.loop_state.state_watch import is_due
from ampscope.capture.loop_state.stillness import MOST_STILL, Stillness, enlarged, movement_of
from ampscope.capture.rerun.engine import LookDepth
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, OutsideTensor, TensorReference
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.user_line import NOWHERE, Place, program_line
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Node, ReplayStatus, Trigger

#: Tensors that are looked at, the first that the loop writes; others of its averages fare alike.
_MOST_TENSORS = 32


class _Key(NamedTuple):
    """Identifies tensors of two gaps as the same: by the line that writes them, and the how-many-th it writes there."""

    place: Place
    ordinal: int
    shape: torch.Size


class _Chain(NamedTuple):
    """The writes to one tensor between two steps."""

    first: OutsideTensor  #: as it was before them
    last: EarlierResult  #: what the last of them left


class StillCarried:
    """Looks at the writes between some steps.

    Args:
        closeups: Runs calls again, and records what they did.
    """

    def __init__(self, closeups: Closeups) -> None:
        self._closeups = closeups
        self._readings: dict[_Key, Stillness] = {}
        self._told = False
        self._looked_at = -1  # step after which the latest calls that were looked at ran

    def look(self, gap: Gap, names: Names, after: tuple[int, int]) -> None:
        """Looks, if the turn has come.

        Args:
            gap: The calls between two steps.
            names: What the tensors that they read are called, by ``id``.
            after: Step and optimizer of the attempt before them.
        """
        if self._told or after[0] <= self._looked_at or not is_due(after[0]):
            return
        self._looked_at = after[0]
        chains = dict(list(_chains(gap))[:_MOST_TENSORS])
        if not chains:
            return
        tracer = self._closeups.engine.tracer(LookDepth.RESULT)
        with Suppressed() as suppressed:
            runs = _Runs(gap, chains, tracer)
            lost = [key for key, chain in chains.items() if self._is_lost(key, chain, runs, after[0])]
            if lost:
                self._tell(gap, {key: chains[key] for key in lost}, names, after)
        tracer.release()
        if suppressed.error is not None:
            self._readings.clear()

    def _is_lost(self, key: _Key, chain: _Chain, runs: _Runs, step: int) -> bool:
        before = chain.first.tensor.detach()
        if float((runs.faithful[key] == before).float().mean()) < MOST_STILL:
            self._readings.pop(key, None)
            return False
        wide = before.float()
        found = movement_of(wide, runs.wide[key], enlarged(wide), runs.larger[key])
        reading = self._readings.setdefault(key, Stillness(before.dtype))
        reading.read(step, before, found)
        return reading.is_lost

    def _tell(self, gap: Gap, lost: dict[_Key, _Chain], names: Names, after: tuple[int, int]) -> None:
        """Records the calls as they ran, and what stands still."""
        self._told = True
        known = {key: names.get(chain.first.identity) for key, chain in lost.items()}
        called = {
            key: (node or (Node.CARRIED, f"carried tensor {n}")) for n, (key, node) in enumerate(known.items(), 1)
        }
        named = names | {chain.first.identity: called[key] for key, chain in lost.items()}
        found = tuple(self._readings[key].described(called[key][1]) for key in lost)
        counted = min(each.since for each in found), after[1]
        sinks = [(called[key][1], chain.last) for key, chain in lost.items()]
        evidence = Evidence(still=found, source=program_line(gap.tape[sinks[0][1].entry].place))
        rows = self._closeups.traced(gap, named, sinks).counted_for(counted)
        self._closeups.record(Trigger.BUFFER_STANDS_STILL, counted, rows, ReplayResult(ReplayStatus.EXACT), evidence)


class _Runs:
    """The calls run again: as they were, in float32, and in float32 from larger values."""

    def __init__(self, gap: Gap, chains: dict[_Key, _Chain], tracer: Tracer) -> None:
        self._gap = gap
        self._chains = chains
        self._averages = {chain.first.identity for chain in chains.values()}
        self.faithful = self._results(Closeup(gap, tracer, {}))
        with EverythingIn(torch.float32).active(lambda: NOWHERE):
            self.wide = self._results(Closeup(gap, tracer, {}, leaf=lambda _, tensor: wide(tensor)))
            self.larger = self._results(Closeup(gap, tracer, {}, leaf=self._leaf_enlarged))

    def _leaf_enlarged(self, identity: int, tensor: Tensor) -> Tensor:
        return enlarged(wide(tensor)) if identity in self._averages else wide(tensor)

    def _results(self, run: Closeup) -> dict[_Key, Tensor]:
        return dict(zip(self._chains, run.rerun([chain.last for chain in self._chains.values()]), strict=True))


def _chains(gap: Gap) -> Iterator[tuple[_Key, _Chain]]:
    """The tensors in half precision whose values before the calls are known, each with what the last write left."""
    kept = _kept(gap)
    owner: dict[tuple[int, int], OutsideTensor] = {}
    last: dict[int, _Chain] = {}
    for number, entry in enumerate(gap.tape.entries):
        targets = _targets(entry)
        for leaf, target in enumerate(targets):
            first = kept.get(target.identity) if isinstance(target, OutsideTensor) else None
            if isinstance(target, EarlierResult):
                width = len(_targets(gap.tape[target.entry])) or 1
                first = owner.get((target.entry, target.leaf % width))
            if first is not None:
                owner[number, leaf] = first
                last[first.identity] = _Chain(first, EarlierResult(number, leaf))
    counts: dict[tuple[Place, torch.Size], int] = {}
    for chain in last.values():
        place, shape = gap.tape[chain.last.entry].place, chain.first.tensor.shape
        counts[place, shape] = counts.get((place, shape), 0) + 1
        yield _Key(place, counts[place, shape], shape), chain


def _targets(entry: Entry) -> list[TensorReference]:
    """Returns the tensors that a call writes in place, as far as its first argument tells."""
    if not entry.in_place or not entry.arguments.args:
        return []
    first = entry.arguments.args[0]
    each = first if isinstance(first, (list, tuple)) else [first]
    return [reference for reference in each if isinstance(reference, TensorReference)]


def _kept(gap: Gap) -> dict[int, OutsideTensor]:
    """Returns by ``id`` the tensors that were copied before the calls overwrote them."""
    found: dict[int, OutsideTensor] = {}
    for entry in gap.tape.entries:
        for reference in entry.arguments.outside:
            tensor = reference.tensor
            is_copy = id(tensor) != reference.identity
            fits = tensor.dtype in HALF and tensor.numel() > 0 and not tensor.requires_grad
            if is_copy and fits and torch_private.version_counter(tensor) == reference.version:
                found.setdefault(reference.identity, reference)
    return found
