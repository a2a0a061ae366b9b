"""The verdict is drawn: the card on top, incidents and findings, remedies, and where an incident's parts lead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import streamlit as st

from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail
from ampscope.analysis.results import Diagnosis, Finding, Incident, PathNode, Remedy
from ampscope.analysis.step_graph import IncidentSurroundings
from ampscope.analysis.words import capitalized, op_in_words, when_in_words
from ampscope.report.figures.course_figure import course_figure
from ampscope.report.html.cards import item_html, remedy_mark, verdict_html
from ampscope.report.html.markup import as_html, as_source
from ampscope.report.html.ops_svg import PathWays
from ampscope.report.numbers import count, value
from ampscope.report.safe_text import short
from ampscope.trace.vocabulary import Severity
from blocks.figure import show_figure
from blocks.page_links import many_ways, rank_of, to_incident, way_to
from blocks.table import table
from blocks.text import heading, keep_room, paragraph, watch_line
from charts import course_chart
from data.run_results import Item, recorded_before, recorded_parameters_of, recorded_place_of, repro_script
from data.run_snapshot import RunSnapshot
from state import Page

#: Pixels: a line of code, and what is around it.
_LINE, _AROUND = 22.4, 32


def remedy_list(item: Incident | Finding) -> None:
    """The remedies in the order of the diagnosis, which puts the best first."""
    for remedy in item.remedies:
        with st.container(gap=None):
            st.html(f"<div>{as_html(remedy.text, 1000)} {remedy_mark(item, remedy)}</div>")
            remedy_code(remedy)


def code_height(remedy: Remedy) -> int:
    """The least height of `remedy_code`, in pixels."""
    lines = (remedy.diff or remedy.code).rstrip().count("\n") + 1
    return round(_LINE * lines) + _AROUND if remedy.diff or remedy.code else 0


def remedy_code(remedy: Remedy) -> None:
    """Shows the code to write: the change of the user's own lines where it is known, else the general form."""
    if remedy.diff:
        st.code(as_source(remedy.diff), language="diff", wrap_lines=True)
    elif remedy.code:
        st.code(as_source(remedy.code), language="python", wrap_lines=True)


def diagnosis_card(diagnosis: Diagnosis) -> None:
    """The one thing to tell first, with the code of the best remedy to copy; a healthy run says so calmly."""
    st.html(verdict_html(diagnosis))
    remedies = diagnosis.primary.remedies if diagnosis.primary else ()
    if remedies:
        with st.container(key="amp-remedy"):
            keep_room("amp-remedy", code_height(remedies[0]))
            remedy_code(remedies[0])


def item_card(item: Incident | Finding, *, ranks: str = "") -> None:
    """One incident or finding; a harmless one says that it is. ``ranks`` is HTML on the ranks it concerns."""
    st.html(item_html(item, ranks=ranks))


_SEVERITIES = {Severity.ERROR: "problem", Severity.WARNING: "warning", Severity.INFO: "harmless"}
_ICONS = {
    Severity.ERROR: ":material/error:",
    Severity.WARNING: ":material/warning:",
    Severity.INFO: ":material/info:",
}
#: Rows of the list; the incident page has all of them.
_LISTED = 20


def item_list(items: dict[str, Item]) -> None:
    """All that was noticed: each a link, with where it happened beneath."""
    for name, item in list(items.items())[:_LISTED]:
        with st.container(gap=None):
            item_link(name, item, item_line(item))
            if where := _where(item):
                st.html(f'<div class="amp-place amp-under">{as_html(where)}</div>')
    if len(items) > _LISTED:
        st.caption(f"{len(items) - _LISTED:,} more are on the Incident page.")


def item_link(name: str, item: Item, label: str) -> None:
    """A link, in our own words, to the incident page that shows ``item``."""
    to_incident(name, label, icon=_ICONS[item.severity], rank=rank_of(item))


def item_line(item: Item) -> str:
    """One line: when, what, how bad."""
    steps = when_in_words(item)
    return f"{capitalized(steps)}: {what_in_words(item)} ({_SEVERITIES[item.severity]})"


def _where(item: Item) -> str:
    module = short(item.module, 60) if isinstance(item, Incident) else ""
    line = f"{short(item.source.file, 60)}:{item.source.line}" if item.source else ""
    return ", ".join(part for part in (module, line) if part)


_COLUMNS = ("Tensor", "First recorded", "Largest then", "Last recorded up to it", "Largest at last")


def before_it(run: RunSnapshot, incident: Incident, closeup: IncidentSurroundings) -> None:
    """The course of what the op gave, and where its operands began and ended; nothing where no step recorded them.

    Args:
        run: The run, seen from the incident's rank.
        incident: Its op.
        closeup: Who gave it its operands.
    """
    seen = recorded_before(run, incident, closeup)
    if not seen:
        return
    heading("Over the recorded steps")
    _, name, own = seen[0]
    course = course_figure(own, marked=incident.step)
    show_figure(course_chart(course), "before-it", f"Largest magnitude of {name}", f"{name}: {course.label}")
    st.caption(f"Drawn: {name}. Largest: the largest magnitude that is finite.")
    ways = [way_to(Page.RANGES, place=key, rank=rank_of(incident)) for key, *_ in seen]
    rows = [_row(name, each, incident.step) for _, name, each in seen]
    table("Largest magnitudes in the recorded steps up to it", _COLUMNS, rows, numeric=_COLUMNS[1:], ways=ways)


def _row(name: str, seen: PlaceDetail, step: int) -> tuple[str, ...]:
    steps, powers = seen.course.steps, seen.course.values
    last = bisect_right(steps, step) - 1
    where = short(f"{name} ({seen.row.module})" if seen.row.module else name, 90)
    return where, count(steps[0]), value(2.0 ** powers[0]), count(steps[last]), value(2.0 ** powers[last])


#: Ranks that have a chip each; the rest is counted.
_CHIPS = 12


def path_ways(run: RunSnapshot, incident: Incident) -> PathWays:
    """The ways from the nodes of an incident's path; ``run`` is seen from the incident's rank."""
    rank, key_of, way = rank_of(incident), recorded_place_of(run), many_ways()
    at = {"step": incident.step, "source": incident.traced or None, "rank": rank}

    def values(node: PathNode) -> str:
        key = key_of(node)
        return way(Page.RANGES, place=key, rank=rank).address if key is not None else ""

    return PathWays(
        op=lambda node: way(Page.REPLAY, op=node.seq, **at).address,
        module=lambda node: way(Page.PRECISION, module=node.module, **at).address if node.module else "",
        values=values,
        copies=True,
    )


def parameter_way(run: RunSnapshot, incident: Incident) -> Callable[[str], str]:
    """Returns a function from a parameter's name to a link: to the values of its gradient, or of itself."""
    keys = recorded_parameters_of(run)

    def way(name: str) -> str:
        return way_to(Page.RANGES, place=keys[name], rank=rank_of(incident)).address if name in keys else ""

    return way


def rank_chips(incident: Incident) -> str:
    """A chip for each rank that went bad, a link to it among the others; empty where one rank trains alone."""
    if incident.world <= 1:
        return ""
    own = [(rank, "error", "failed itself") for rank in (incident.rank, *incident.also_on)]
    got = [(rank, "warning", "received it") for rank in incident.received_by]
    chips = [_chip(incident.step, *each) for each in (*own, *got)[:_CHIPS]]
    left = len(own) + len(got) - _CHIPS
    more = f' <span class="amp-place">and {left:,} more</span>' if left > 0 else ""
    return f'<div class="amp-chips">{" ".join(chips)}{more}</div>'


def _chip(step: int, rank: int, kind: str, words: str) -> str:
    address = as_html(way_to(Page.RANKS, step=step, rank=rank).address, 2000)
    return f'<a class="amp-chip {kind}" href="{address}" target="_self">rank {rank:,}: {words}</a>'


_ICON = ":material/download:"


def repro_download(run: RunSnapshot, incident: Incident, diagnosis: Diagnosis) -> None:
    """The script and its operands to download; where none were kept, why, and how to keep them."""
    script = repro_script(run, incident)
    if isinstance(script, str):
        paragraph(f"There is no script that shows this op failing on its own: {script}.")
        watch_line(diagnosis, "save_tensors=True")
        return
    paragraph(f"A script that makes this one call of {op_in_words(incident.op)} again, as it ran and in a wider dtype.")
    with st.container(horizontal=True):
        st.download_button("repro.py", script.text, "repro.py", "text/x-python", icon=_ICON, on_click="ignore")
        if script.data is not None:
            name = "repro.safetensors"
            st.download_button(f"{name}, to lie beside it", script.data, name, icon=_ICON, on_click="ignore")
