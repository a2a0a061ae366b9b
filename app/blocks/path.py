"""The way from the origin to the value that mattered, drawn as a chain grouped by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import streamlit as st
from markup import as_html, short
from phrases import span

from ampscope.analysis.results import PathNode
from ampscope.report import figures
from blocks.notes import place

#: Longer paths keep their two ends on screen; the table below has all of it.
_HEAD, _TAIL = 8, 4
_ARROW = '<div class="amp-arrow">&#8595;</div>'


def path_chain(nodes: Sequence[PathNode]) -> None:
    """The chain, origin at the top."""
    marks = _marks(len(nodes))
    drawn = list(zip(nodes, marks, strict=True))
    if len(nodes) <= _HEAD + _TAIL + 1:
        st.html(_groups(drawn))
        return
    left_out = len(nodes) - _HEAD - _TAIL
    gap = f'<div class="amp-arrow">&#8942;<br>{figures.count(left_out, "more op")} in between<br>&#8942;</div>'
    st.html(_groups(drawn[:_HEAD]) + gap + _groups(drawn[-_TAIL:]))
    with st.expander("All ops of the path"):
        st.dataframe([_row(node) for node in nodes], hide_index=True, height=400)


def _row(node: PathNode) -> dict[str, str]:
    return {
        "Op": short(_title(node), 120),
        "Module": short(node.module, 120),
        "Phase": node.phase,
        "Values": span(node.min, node.max),
        "Your line": place(node.source),
    }


def _marks(count: int) -> list[str]:
    marks = [""] * count
    if count:
        marks[-1] = "reached"
        marks[0] = "origin"
    return marks


def _groups(nodes: Iterable[tuple[PathNode, str]]) -> str:
    groups = groupby(nodes, key=lambda pair: pair[0].module)
    return _ARROW.join(_module(module, list(members)) for module, members in groups)


def _module(module: str, members: list[tuple[PathNode, str]]) -> str:
    header = as_html(module, 120) if module else "outside the watched modules"
    return f'<div class="amp-module"><header>{header}</header>{"".join(_node(*member) for member in members)}</div>'


def _node(node: PathNode, mark: str) -> str:
    chip = f' <span class="amp-chip error">{mark}</span>' if mark else ""
    title = as_html(_title(node), 120)
    detail = ", ".join(part for part in (node.phase, f"{node.dtype} {node.shape}".strip()) if part)
    line = f"<br><code>{as_html(_code(node), 160)}</code>" if node.source else ""
    return (
        f'<div class="amp-node {_health(node)}"><b>{title}</b>{chip}<br>{as_html(span(node.min, node.max))}'
        f'<div class="amp-place">{as_html(detail)}{line}</div></div>'
    )


def _code(node: PathNode) -> str:
    return f"{place(node.source)}  {node.source.code.strip()}" if node.source else ""


def _title(node: PathNode) -> str:
    return node.op if node.name in ("", node.op) else f"{node.op} {node.name}"


def _health(node: PathNode) -> str:
    if node.min is None or node.max is None:
        return ""
    return "fine" if math.isfinite(node.min) and math.isfinite(node.max) else "bad"
