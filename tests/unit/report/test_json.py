"""The diagnosis as JSON: a contract with whoever parses it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from ampscope.report.json import as_json, as_plain
from tests.support.verdicts.by_hand import BROKEN, HEALTHY, OVERFLOW, QUERY, RUN
from tests.support.verdicts.operands import changed


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_keys_are_the_contract() -> None:
    told = _strict(as_json(BROKEN))
    assert list(told) == [
        "schema",
        "run",
        "verdict",
        "summary",
        "primary",
        "incidents",
        "findings",
        "scale",
        "note",
        "ranks",
        "cures",
        "since",
        "checked",
        "unobserved",
        "saved",
    ]
    incident = (
        "kind step last_step count severity cause phase op module module_type source inputs outputs path lost "
        "replay replay_reason traced fp32_ok tried trigger tripped explanation remedies rank also_on received_by world "
        "written_by headroom_bits forecast_step forecast_low forecast_high lasting last_good loop_step"
    )
    assert list(told["primary"]) == incident.split()
    finding = (
        "kind step last_step count severity cause counted phase source explanation remedies rank also_on world "
        "loop_step"
    )
    assert list(told["findings"][0]) == finding.split()
    run = "path name created status steps skipped segments device model parameters versions world missing loop_step"
    assert list(told["run"]) == run.split()


def test_values_come_through() -> None:
    told = _strict(as_json(BROKEN))
    assert told["schema"] == 1
    assert told["verdict"] == "problem"
    assert told["primary"] == told["incidents"][1]
    assert told["primary"]["cause"] == "fp16_overflow"
    assert told["primary"]["severity"] == "error"
    assert told["primary"]["source"] == {
        "file": "/home/me/gpt.py",
        "line": 47,
        "function": "Attention.forward",
        "code": "logits = q @ k.transpose(-2, -1)",
    }
    assert [remedy["verified"] for remedy in told["primary"]["remedies"]] == [True, False, None]
    assert told["incidents"][0]["source"] is None
    assert told["primary"]["inputs"][0]["exp_counts"] == [1, 2, 3]
    assert list(told["run"]["versions"]) == ["ampscope", "torch"]


def test_a_healthy_run_has_no_primary() -> None:
    assert _strict(as_json(HEALTHY))["primary"] is None


def test_what_json_cannot_say_is_a_string() -> None:
    odd = changed(QUERY, min=-math.inf, max=math.nan, max_finite=math.inf)
    told = _strict(as_json(replace(BROKEN, primary=replace(OVERFLOW, inputs=(odd,)))))["primary"]["inputs"][0]
    assert (told["min"], told["max"], told["max_finite"]) == ("-Infinity", "NaN", "Infinity")
    assert float(told["min"]) == -math.inf


def test_the_same_diagnosis_gives_the_same_text() -> None:
    shuffled = replace(BROKEN, run=replace(RUN, versions=dict(reversed(RUN.versions.items()))))
    assert as_json(shuffled) == as_json(BROKEN)


def test_any_text_survives() -> None:
    text = '\u202e\x1b[31m \ud800 \N{SNOWMAN} "quoted"'
    assert _strict(json.dumps(as_plain(replace(RUN, name=text))))["name"] == text
    as_json(replace(BROKEN, run=replace(RUN, name=text))).encode("ascii")
