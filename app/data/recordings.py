"""Traced steps loaded op by op and kept while they are looked at: what was traced once does not change."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.replay.lockstep import Lockstep, lockstep
from ampscope.analysis.replay.op_detail import with_histograms
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.replay.track import Track, track
from ampscope.analysis.results import Operand
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.trace.schema import Table
from data.loader import Loaded

#: Steps kept; one of 200,000 ops takes about 50 MB.
KEPT = 6


def _identity(run: Loaded) -> tuple[str, float]:
    """Which run it is, whatever was added to it since."""
    return run.path, run.created


#: For caches of what does not change as a run grows.
BY_IDENTITY = {Loaded: _identity}
_BY_TRACES = {Loaded: lambda run: (*_identity(run), run.of((Table.OPS,)))}


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs=_BY_TRACES)
def traced(run: Loaded) -> tuple[TracedStep, ...]:
    """What was traced of the run on screen, the newest first."""
    return traced_steps(run.run)


@st.cache_resource(max_entries=KEPT, show_spinner="Reading the step", hash_funcs=BY_IDENTITY)
def load(run: Loaded, chosen: TracedStep) -> Recording:
    """A traced step."""
    return recording(run.run, chosen)


@st.cache_resource(max_entries=KEPT, show_spinner=False, hash_funcs=BY_IDENTITY)
def draw(run: Loaded, chosen: TracedStep) -> Track:
    """Its track."""
    return track(load(run, chosen))


@st.cache_resource(max_entries=KEPT, show_spinner="Comparing the steps", hash_funcs=BY_IDENTITY)
def compare(run: Loaded, one: TracedStep, other: TracedStep) -> Lockstep:
    """The one against the other."""
    return lockstep(load(run, one), load(run, other))


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs=BY_IDENTITY)
def histograms(run: Loaded, chosen: TracedStep, position: int) -> tuple[Operand, ...]:
    """What an op wrote, with its exponents."""
    return with_histograms(run.run, load(run, chosen), position)
