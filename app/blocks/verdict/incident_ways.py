"""Links the parts of an incident: ops to Replay, modules to Precision, values to Ranges, ranks to Ranks."""

from __future__ import annotations

from collections.abc import Callable

from ampscope.analysis.results import Incident, PathNode
from ampscope.report.html.figures.ops import PathWays
from ampscope.report.html.markup import as_html
from blocks.basics.page_links import many_ways, rank_of, way_to
from data.recorded_places import recorded_parameters_of, recorded_place_of
from data.run_snapshot import RunSnapshot
from state.pages import Page

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
