"""The typed results of analysis: what every page, text and JSON view is made from."""

from ampscope.analysis.results.diagnosis import (
    JSON_SCHEMA,
    Checked,
    Diagnosis,
    MadeCure,
    RunInfo,
    ScaleHealth,
    ScaleVerdict,
)
from ampscope.analysis.results.incidents import Finding, Incident, LastGood, Move, MoveKind, WrittenBy
from ampscope.analysis.results.lines import CodeLine, Operand, PathNode, SourceLine
from ampscope.analysis.results.remedies import Cost, FormTried, Remedy, Tried

__all__ = [
    "JSON_SCHEMA",
    "Checked",
    "CodeLine",
    "Cost",
    "Diagnosis",
    "Finding",
    "FormTried",
    "Incident",
    "LastGood",
    "MadeCure",
    "Move",
    "MoveKind",
    "Operand",
    "PathNode",
    "Remedy",
    "RunInfo",
    "ScaleHealth",
    "ScaleVerdict",
    "SourceLine",
    "Tried",
    "WrittenBy",
]
