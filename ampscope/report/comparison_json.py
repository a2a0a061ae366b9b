"""A comparison as JSON: the object that ``ampscope compare --json`` prints."""

from __future__ import annotations

import json

from ampscope.analysis.replay.compare.results import Comparison
from ampscope.report.diagnosis_json import as_plain


def as_json(comparison: Comparison) -> str:
    """The comparison as a JSON object; its keys are the fields of the result types, numbers as in a diagnosis."""
    return json.dumps(as_plain(comparison), indent=2, allow_nan=False)
