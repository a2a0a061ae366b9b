"""Traced steps loaded op by op and kept while they are looked at: what was traced once does not change."""

from __future__ import annotations

import loader
import streamlit as st

from ampscope.analysis.replay import Recording, recording
from ampscope.analysis.replay_lockstep import Lockstep, lockstep
from ampscope.analysis.replay_op import with_histograms
from ampscope.analysis.replay_track import Track, track
from ampscope.analysis.results import Operand
from ampscope.analysis.traced import TracedStep, traced_steps
from ampscope.trace.reader import open_run

#: Steps kept; one of 200,000 ops takes about 50 MB.
_KEPT = 6


def traced(run: loader.Loaded) -> tuple[TracedStep, ...]:
    """What was traced of the run on screen, the newest first."""
    return _traced(run.path, run.stamp)


def load(run: loader.Loaded, chosen: TracedStep) -> Recording:
    """A traced step."""
    return _recording(run.path, chosen)


def draw(run: loader.Loaded, chosen: TracedStep) -> Track:
    """Its track."""
    return _track(run.path, chosen)


def compare(run: loader.Loaded, one: TracedStep, other: TracedStep) -> Lockstep:
    """The one against the other."""
    return _lockstep(run.path, one, other)


def histograms(run: loader.Loaded, chosen: TracedStep, position: int) -> tuple[Operand, ...]:
    """What an op wrote, with its exponents."""
    return _histograms(run.path, chosen, position)


@st.cache_resource(max_entries=16, show_spinner=False)
def _traced(path: str, stamp: str) -> tuple[TracedStep, ...]:  # noqa: ARG001  the stamp is part of the cache's key
    with open_run(path) as run:
        return traced_steps(run)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the step")
def _recording(path: str, chosen: TracedStep) -> Recording:
    with open_run(path) as run:
        return recording(run, chosen)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _track(path: str, chosen: TracedStep) -> Track:
    return track(_recording(path, chosen))


@st.cache_resource(max_entries=_KEPT, show_spinner="Comparing the steps")
def _lockstep(path: str, one: TracedStep, other: TracedStep) -> Lockstep:
    return lockstep(_recording(path, one), _recording(path, other))


@st.cache_resource(max_entries=64, show_spinner=False)
def _histograms(path: str, chosen: TracedStep, position: int) -> tuple[Operand, ...]:
    with open_run(path) as run:
        return with_histograms(run, _recording(path, chosen), position)
