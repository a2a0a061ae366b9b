"""The JSON Schema of what verbs print: what they print keeps to it, and it tells programs apart from chance."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ampscope.cli.program_verbs import RESULTS
from ampscope.report.json import schema_of
from tests.support.command import Command
from tests.support.paths import SAMPLES

RUNS = sorted(path.name for path in SAMPLES.iterdir() if (path / "run.json").exists())


def _schema(ampscope: Command, verb: str) -> Any:
    answer = ampscope("schema", verb)
    assert (answer.code, answer.err) == (0, "")
    return json.loads(answer.out)


@pytest.mark.parametrize("verb", sorted(RESULTS))
def test_what_a_verb_prints_keeps_to_its_schema(ampscope: Command, verb: str) -> None:
    schema = _schema(ampscope, verb)
    Draft202012Validator.check_schema(schema)
    for run in RUNS:
        others: dict[str, list[object]] = {"compare": [SAMPLES / "healthy"], "compact": ["--dry-run"]}
        arguments = [SAMPLES / run, *others.get(verb, [])]
        printed = json.loads(ampscope(verb, *arguments, "--json").out)
        assert [error.message for error in Draft202012Validator(schema).iter_errors(printed)] == []


def test_another_type_or_a_missing_key_is_an_error(ampscope: Command) -> None:
    check = Draft202012Validator(_schema(ampscope, "diagnose"))
    printed = json.loads(ampscope("diagnose", SAMPLES / "healthy", "--json").out)
    assert check.is_valid(printed)
    assert not check.is_valid({**printed, "verdict": "fine"})
    assert not check.is_valid({**printed, "run": {**printed["run"], "steps": "300"}})
    assert not check.is_valid({key: value for key, value in printed.items() if key != "summary"})
    assert not check.is_valid({**printed, "more": 1})


def test_nan_and_infinities_are_strings(ampscope: Command) -> None:
    schema = _schema(ampscope, "diagnose")
    number = Draft202012Validator({"$ref": "#/$defs/number_or_nonfinite", "$defs": schema["$defs"]})
    assert all(number.is_valid(each) for each in (1, 1.5, "NaN", "Infinity", "-Infinity"))
    assert not number.is_valid("1.5")


def test_fields_are_described_by_their_comments(ampscope: Command) -> None:
    run = _schema(ampscope, "diagnose")["$defs"]["RunInfo"]["properties"]
    assert run["steps"] == {"type": "integer", "description": "optimizer step attempts"}


def test_without_a_verb_all_are_printed_by_name(ampscope: Command) -> None:
    answer = ampscope("schema")
    assert set(json.loads(answer.out)) == set(RESULTS)


def test_a_verb_without_json_is_an_error(ampscope: Command) -> None:
    answer = ampscope("schema", "view")
    assert answer.code == 2
    assert "'view' prints no JSON; there are diagnose, gate" in answer.err


def test_a_type_that_has_no_schema_is_named() -> None:
    @dataclasses.dataclass
    class Odd:
        when: complex

    Odd.__annotations__["when"] = complex
    with pytest.raises(TypeError, match="complex"):
        schema_of(Odd)
