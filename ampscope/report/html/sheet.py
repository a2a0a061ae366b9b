"""The style sheet of the HTML that this room gives; it takes ink from the page and adds only what has a meaning."""

from __future__ import annotations

from ampscope.report.html.palette import (
    ALARM,
    ALARM_SHADE,
    CURVE,
    GOOD,
    HAIRLINE,
    MARK,
    SEVERITIES,
    SHADE,
    WARNING_SHADE,
)
from ampscope.trace.vocabulary import Severity

_WARNING, _INFO = SEVERITIES[Severity.WARNING], SEVERITIES[Severity.INFO]

_TEXT = f"""
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
.amp-under {{ padding: 0 0 4px 2.3rem; }}
.amp-place {{ font-size: 0.82rem; opacity: 0.7; overflow-wrap: anywhere; }}
.amp-scroll {{ overflow-x: auto; }}
.amp-table {{ border-collapse: collapse; width: 100%; font-size: 0.88rem; }}
.amp-table th {{ text-align: left; font-weight: 600; opacity: 0.7; }}
.amp-table th, .amp-table td {{ border-bottom: 1px solid {HAIRLINE}; padding: 5px 12px 5px 0; vertical-align: top; }}
.amp-table td {{ max-width: 28rem; overflow-wrap: anywhere; }}
.amp-table .num {{ text-align: right; }}
.amp-table .long {{ min-width: 13rem; }}
.amp-table .one-line {{ white-space: nowrap; }}
.amp-card.warning .amp-code.hit {{ background: {WARNING_SHADE}; border-left-color: {_WARNING}; }}
.amp-card.info .amp-code.hit {{ background: {SHADE}; border-left-color: {_INFO}; }}
.amp-remedies {{ padding-left: 1.3rem; margin: 0; }}
.amp-remedies li {{ margin: 0 0 12px; }}
.amp-checks {{ list-style: none; margin: 0; padding: 0 !important; display: grid; gap: 4px 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }}
.amp-checks li {{ display: grid; grid-template-columns: 1.5rem 1fr; margin: 0; }}
.amp-checks .amp-place {{ grid-column: 2; }}
.amp-checks [role=img] {{ font-weight: 700; }}
.amp-checks .passed [role=img] {{ color: {GOOD}; }} .amp-checks .failed [role=img] {{ color: {ALARM}; }}
.amp-checks .failed {{ font-weight: 600; }} .amp-checks .idle {{ opacity: 0.6; }}
.amp-listing {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); margin: 4px 0 0; font-size: 0.86rem;
  background: {SHADE}; border-radius: 4px; padding: 6px 0; font-family: "Source Code Pro", ui-monospace, monospace; }}
.amp-listing code {{ font: inherit; background: none; color: inherit; padding: 1px 10px; white-space: pre-wrap;
  overflow-wrap: anywhere; border-left: 3px solid transparent; }}
.amp-listing code.hit {{ background: {ALARM_SHADE}; border-left-color: {ALARM}; }}
.amp-listing .amp-number {{ opacity: 0.55; text-align: right; padding: 1px 8px 1px 10px; user-select: none; }}
.amp-listing .amp-gap {{ opacity: 0.55; padding: 0 10px; }}
"""

_FIGURES = f"""
.amp-graph {{ container-type: inline-size; }}
.amp-flows {{ display: flex; flex-direction: column; gap: 14px; }}
.amp-flow {{ display: flex; flex-wrap: wrap; align-items: flex-start; row-gap: 12px; }}
.amp-flow.backward {{ flex-direction: row-reverse; }}
.amp-direction {{ flex: 0 0 100%; font-size: 0.78rem; font-weight: 600; opacity: 0.65; }}
.amp-flow.forward > .amp-direction::after {{ content: " \\2192"; }}
.amp-flow.backward > .amp-direction {{ text-align: right; }}
.amp-flow.backward > .amp-direction::before {{ content: "\\2190\\a0"; }}
.amp-to {{ flex: none; width: 28px; margin-top: 34px; text-align: center; font-size: 1.2rem; opacity: 0.6; }}
.amp-flow.forward > .amp-to::before {{ content: "\\2192"; }}
.amp-flow.backward > .amp-to::before {{ content: "\\2190"; }}
.amp-module {{ border: 1px solid {HAIRLINE}; border-radius: 8px; padding: 8px 10px; box-sizing: border-box;
  min-width: 120px; max-width: 216px; }}
.amp-module > header {{ font-size: 0.8rem; font-weight: 600; opacity: 0.75; margin-bottom: 4px;
  overflow-wrap: anywhere; }}
.amp-module.faint, .amp-fold.faint {{ opacity: 0.6; border-style: dashed; }}
.amp-readers {{ display: flex; flex-wrap: wrap; gap: 4px 18px; max-width: none; margin-top: 12px; }}
.amp-readers > header {{ flex: 0 0 100%; margin: 0; }}
.amp-node {{ border-left: 4px solid {_INFO}; padding: 3px 0 3px 9px; margin: 6px 0; overflow-wrap: anywhere;
  font-size: 0.9rem; line-height: 1.35; }}
.amp-node.bad {{ border-left-color: {ALARM}; }}
.amp-node.fine {{ border-left-color: {GOOD}; }}
.amp-node.origin {{ background: {ALARM_SHADE}; border-radius: 0 6px 6px 0; padding: 6px 8px 6px 9px; }}
.amp-node .amp-line {{ display: block; background: none; padding: 2px 0 0; color: inherit; font-size: 0.76rem;
  opacity: 0.8; font-family: "Source Code Pro", ui-monospace, monospace; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }}
.calm .amp-node.bad, .calm .amp-node.origin {{ border-left-color: {_INFO}; background: none; }}
.calm .amp-chip.error {{ color: {_INFO}; }}
.calm code.hit {{ background: {SHADE} !important; border-left-color: {_INFO} !important; }}
.amp-swatch {{ display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }}
.amp-fold > summary {{ cursor: pointer; font-size: 0.82rem; opacity: 0.8; padding: 4px 2px; }}
.amp-flow > .amp-fold {{ margin-top: 22px; border: 1px dashed {HAIRLINE}; border-radius: 8px; padding: 6px 10px; }}
.amp-flow > .amp-fold .amp-module {{ margin: 6px 0; }}
@container (max-width: 620px) {{
  .amp-flow, .amp-flow.backward {{ flex-direction: column; flex-wrap: nowrap; row-gap: 0; }}
  .amp-flow > .amp-module, .amp-flow > .amp-fold {{ max-width: none; align-self: stretch; }}
  .amp-flow.forward > .amp-to::before, .amp-flow.backward > .amp-to::before {{ content: "\\2193"; }}
  .amp-flow.backward > .amp-direction {{ text-align: left; }}
  .amp-flow > .amp-direction {{ flex: none; padding-bottom: 4px; }}
  .amp-flow > .amp-to, .amp-flow > .amp-fold {{ margin-top: 0; }}
  .amp-flow > .amp-to {{ align-self: center; }}
}}
.amp-shares {{ display: grid; grid-template-columns: minmax(0, max-content) minmax(0, 1fr); gap: 4px 10px; }}
.amp-share-name {{ font-size: 0.82rem; text-align: right; max-width: 13rem; align-self: center;
  overflow-wrap: anywhere; }}
.amp-share {{ display: flex; height: 22px; border-radius: 4px; overflow: hidden; }}
.amp-share span {{ font-size: 0.75rem; line-height: 22px; text-align: center; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }}
.amp-panel-name {{ font-size: 0.82rem; margin: 8px 0 2px; overflow-wrap: anywhere; }}
.amp-key {{ color: {ALARM}; font-weight: 600; }}
.amp-faint {{ opacity: 0.75; }}
.amp-magnitudes {{ position: relative; }}
.amp-histogram {{ position: relative; height: 92px; border-bottom: 1px solid {HAIRLINE}; overflow: hidden; }}
.amp-histogram > i {{ position: absolute; bottom: 0; border-radius: 2px 2px 0 0;
  height: calc((100% - 18px) * var(--part)); }}
.amp-beyond {{ position: absolute; top: 0; bottom: 0; color: {ALARM}; background: repeating-linear-gradient(135deg,
  {ALARM_SHADE} 0 5px, transparent 5px 10px); }}
.amp-beyond.low {{ border-right: 1.5px dashed {ALARM}; }} .amp-beyond.high {{ border-left: 1.5px dashed {ALARM}; }}
.amp-beyond em {{ position: absolute; top: 1px; font-size: 0.72rem; font-style: normal; white-space: nowrap; }}
.amp-beyond.low em {{ left: calc(100% + 4px); }} .amp-beyond.high em {{ right: calc(100% + 4px); }}
.amp-nothing {{ position: absolute; inset: 24px 0 0; text-align: center; font-size: 0.86rem; opacity: 0.75; }}
.amp-reach {{ position: absolute; top: 16px; bottom: 0; border-left: 2.5px solid currentColor; }}
.amp-reached {{ white-space: nowrap; padding-left: 8px; }}
.amp-reached::before {{ content: ""; display: inline-block; height: 0.9em; border-left: 2.5px solid currentColor;
  margin-right: 5px; vertical-align: -0.1em; }}
.amp-names {{ columns: 17rem auto; }}
.amp-bands {{ margin-top: 10px; }}
.amp-band {{ position: relative; height: 21px; margin: 2px 0; overflow: hidden; border-radius: 3px; }}
.amp-band > * {{ position: absolute; top: 0; bottom: 0; }}
.amp-band > .pale {{ opacity: 0.4; }}
.amp-band > span {{ font-size: 0.75rem; line-height: 21px; text-align: center; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }}
.amp-powers, .amp-steps {{ position: relative; height: 20px; font-size: 0.76rem; opacity: 0.75; overflow: hidden; }}
.amp-powers span, .amp-steps span {{ position: absolute; transform: translateX(-50%); white-space: nowrap; }}
.amp-stack {{ margin: 0; }}
.amp-stack .amp-panel-name {{ margin: 10px 0 6px; }}
.amp-stack figcaption {{ text-align: center; }}
.amp-plot {{ display: grid; grid-template-columns: 84px minmax(0, 1fr); column-gap: 8px; }}
.amp-canvas {{ position: relative; height: 104px; border-left: 1px solid {HAIRLINE}; margin-right: 14px; }}
.amp-steps {{ margin-right: 14px; overflow: visible; }}
.amp-canvas svg {{ position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }}
.amp-canvas path {{ fill: none; vector-effect: non-scaling-stroke; }}
.amp-canvas .grid {{ stroke: {HAIRLINE}; stroke-width: 1; }}
.amp-canvas .moment {{ stroke: {MARK}; stroke-width: 1; stroke-dasharray: 2 3; }}
.amp-canvas .curve {{ stroke: {CURVE}; stroke-width: 1.6; stroke-linecap: round; }}
.amp-canvas .mark {{ stroke: currentColor; stroke-width: 2; }}
.amp-ticks {{ position: relative; font-size: 0.76rem; opacity: 0.8; text-align: right; }}
.amp-ticks span {{ position: absolute; right: 0; transform: translateY(50%); white-space: nowrap; }}
.amp-lane {{ margin-top: 4px; }}
.amp-lane .amp-canvas {{ height: 20px; border-left: 0; }}
.amp-dot, .amp-edge, .amp-glyph {{ position: absolute; transform: translateX(-50%); line-height: 1; cursor: default; }}
.amp-dot {{ width: 7px; height: 7px; border-radius: 50%; background: {CURVE}; transform: translate(-50%, 50%); }}
.amp-edge {{ color: {ALARM}; font-size: 0.8rem; }}
.amp-edge.top {{ top: 2px; }} .amp-edge.bottom {{ bottom: 2px; }}
.amp-glyph {{ top: 3px; font-size: 0.95rem; }}
"""

SHEET = _TEXT + _FIGURES
