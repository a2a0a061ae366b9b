"""The style sheet of the app's own HTML; it takes ink from the theme and adds only what has a meaning."""

from __future__ import annotations

import streamlit as st
from palette import ALARM, ALARM_SHADE, GOOD, HAIRLINE, SEVERITIES, SHADE, WARNING_SHADE

from ampscope.trace.vocabulary import Severity

_WARNING, _INFO = SEVERITIES[Severity.WARNING], SEVERITIES[Severity.INFO]

_SHEET = f"""
.stMainBlockContainer {{ padding: 2.6rem 2.2rem 3rem; }}
.stMainBlockContainer h1 {{ font-size: 2rem; padding-bottom: 0.2rem; }}
.stMainBlockContainer h3 {{ font-size: 1.3rem; }}
.amp-card {{ border: 1px solid {HAIRLINE}; border-left: 6px solid {_INFO}; border-radius: 8px; padding: 14px 18px; }}
.amp-card.error {{ border-left-color: {ALARM}; }}
.amp-card.warning {{ border-left-color: {_WARNING}; }}
.amp-card.good {{ border-left-color: {GOOD}; }}
.amp-title {{ font-size: 1.35rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }}
.amp-facts {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 8px 16px; margin: 12px 0 0; }}
.amp-facts > span {{ opacity: 0.65; margin: 0; padding: 0; }}
.amp-facts > div {{ margin: 0; padding: 0; overflow-wrap: anywhere; }}
.amp-tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; }}
.amp-tile {{ border: 1px solid {HAIRLINE}; border-radius: 8px; padding: 10px 12px; min-width: 0; }}
.amp-tile b {{ display: block; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; line-height: 1.3; }}
.amp-tile span {{ font-size: 0.82rem; opacity: 0.7; overflow-wrap: anywhere; }}
.amp-chip {{ display: inline-block; border-radius: 4px; padding: 1px 7px; font-size: 0.78rem; font-weight: 600;
  border: 1.5px solid currentColor; white-space: nowrap; }}
.amp-chip.error {{ color: {ALARM}; }} .amp-chip.warning {{ color: {_WARNING}; }} .amp-chip.info {{ color: {_INFO}; }}
.amp-chip.good {{ color: {GOOD}; }}
.amp-code {{ font-family: "Source Code Pro", ui-monospace, monospace; font-size: 0.86rem; background: {SHADE};
  border-radius: 4px; padding: 6px 10px; margin: 4px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
.amp-code.hit {{ background: {ALARM_SHADE}; border-left: 3px solid {ALARM}; }}
[data-testid="stPageLink-NavLink"] * {{ white-space: normal; overflow: visible; text-overflow: clip; }}
.amp-under {{ padding: 0 0 4px 2.3rem; }}
.amp-card.warning .amp-code.hit {{ background: {WARNING_SHADE}; border-left-color: {_WARNING}; }}
.amp-card.info .amp-code.hit {{ background: {SHADE}; border-left-color: {_INFO}; }}
.amp-place {{ font-size: 0.82rem; opacity: 0.7; overflow-wrap: anywhere; }}
.amp-module {{ border: 1px solid {HAIRLINE}; border-radius: 8px; padding: 8px 12px; }}
.amp-module > header {{ font-size: 0.82rem; opacity: 0.75; margin-bottom: 6px; overflow-wrap: anywhere; }}
.amp-node {{ border-left: 4px solid {_INFO}; padding: 4px 0 4px 10px; margin: 6px 0; overflow-wrap: anywhere; }}
.amp-node.bad {{ border-left-color: {ALARM}; }}
.amp-node.fine {{ border-left-color: {GOOD}; }}
.amp-arrow {{ text-align: center; opacity: 0.6; line-height: 1; margin: 4px 0; }}
.amp-scroll {{ overflow-x: auto; }}
.amp-table {{ border-collapse: collapse; width: 100%; font-size: 0.88rem; }}
.amp-table th {{ text-align: left; font-weight: 600; opacity: 0.7; }}
.amp-table th, .amp-table td {{ border-bottom: 1px solid {HAIRLINE}; padding: 5px 12px 5px 0; vertical-align: top; }}
.amp-table td {{ max-width: 28rem; overflow-wrap: anywhere; }}
.amp-table .num {{ text-align: right; }}
.amp-table .long {{ min-width: 13rem; }}
.amp-table .one-line {{ white-space: nowrap; }}
.amp-node code {{ background: none; padding: 0; color: inherit; font-size: 0.82rem; }}
"""


def style() -> None:
    """Put the style sheet into the page."""
    st.html(f"<style>{_SHEET}</style>")
