"""Remedies as diffs of the user's own lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ampscope.analysis.results import CodeLine, FormTried, SourceLine
from ampscope.cures.rewriting.dtype_words import converted
from ampscope.cures.rewriting.edit import diff_at, joined
from ampscope.cures.rewriting.found_call import Asked
from ampscope.cures.rewriting.program import around_model_call, first_settings, half
from ampscope.cures.rewriting.source_file import HasPlace, path_below, source_file
from ampscope.cures.rewritten_statement import diff_of_form, diff_of_forms
from ampscope.trace.evidence import Evidence, ProgramLine, read
from ampscope.trace.read.run import Run
from ampscope.trace.schema import LOSS_CODE, Table


class Program(NamedTuple):
    """Holds the lines of a program around its model, as far as they are known."""

    watched_at: SourceLine | None = None  #: the line that calls ``watch``; None where it was not recorded
    called_from: tuple[SourceLine, ...] = ()  #: the lines that call the models
    under_autocast: tuple[SourceLine, ...] = ()  #: those among them around which an autocast region was
    tensors: int = 0  #: how many tensors their one call returned, one or a tuple; 0: something else, or not known


def program_of(run: Run) -> Program:
    """The lines of a run's program, as its trace has them."""
    rows = [row for rank in run.ranks for row in run.rows(Table.INCIDENTS, rank=rank)]
    told = [each for row in rows for each in Evidence.of(row).called_from]
    lines = {line: bool(each.autocast) for each in told if (line := SourceLine.of(each)) is not None}
    tensors = {each.tensors for each in told} if len(lines) == 1 else set()
    return Program(
        watched_at=_line(run.manifest.configuration.get("watched_at")),
        called_from=tuple(lines),
        under_autocast=tuple(line for line, inside in lines.items() if inside),
        tensors=tensors.pop() if len(tensors) == 1 else 0,
    )


def changed_since(run: Run, file: str) -> SourceLine | None:
    """A recorded line of a file that reads otherwise now; None where all read as they did, or it is not at hand."""
    if path_below(file) is None:
        return None
    sites = (row for rank in run.ranks for row in run.rows(Table.SITES, rank=rank) if row.file == file)
    lines = {SourceLine(file=file, line=row.line, function=row.function, code=row.code) for row in sites if row.code}
    return next((each for each in sorted(lines, key=lambda each: each.line) if source_file(each) is None), None)


def _line(told: Any) -> SourceLine | None:
    return SourceLine.of(read(ProgramLine, told))


#: A module of one among several watched models: ``Generator[1].head``.
_OF_SEVERAL = re.compile(r"\w+\[(\d+)\]\.?(.*)")


def of_form(tried: FormTried) -> str | None:
    """Another form of a call as a diff of the line that makes it; None where that line cannot be changed so."""
    return diff_of_form(tried.source, tried.form, asked_of(tried)) if tried.source is not None else None


def of_forms(tried: Sequence[FormTried]) -> str | None:
    """Other forms of several calls, of one line or of several, as one diff; None where one cannot be written."""
    places = [each.source for each in tried]
    place = places[0] if len(set(places)) == 1 and len(places) > 1 else None
    if place is None:
        return joined(list(map(of_form, tried)))
    return diff_of_forms(place, [(each.form, asked_of(each)) for each in tried])


def asked_of(tried: FormTried) -> Asked:
    """The call that was given another form."""
    return Asked(tried.call, tried.argument, tried.value, tried.was)


def of_conversions(lines: Sequence[CodeLine], dtype: str) -> str | None:
    """Conversions to half precision, to ``dtype`` instead; None where one of the lines names none."""
    return joined([diff_at(line, lambda code, _, scope: converted(code, dtype, scope)) for line in lines])


def of_kept(modules: Sequence[str], program: Program) -> str | None:
    """Modules kept in float32, before the line that calls ``watch``; None where that is not known or not at hand.

    Args:
        modules: Their names, as a diagnosis gives them.
        program: Its lines.
    """
    if program.watched_at is None:
        return None
    if LOSS_CODE in modules:
        others = [name for name in modules if name != LOSS_CODE]
        return joined([_of_loss(program), *([of_kept(others, program)] if others else [])])
    by_model: dict[int, list[str]] = {}
    for name in modules:
        number, inner = of_which_model(name)
        by_model.setdefault(number or 0, []).append(inner)
    return half.kept_modules(program.watched_at, by_model)


def _of_loss(program: Program) -> str | None:
    """The loss taken out of the one autocast region that calls a model, which gives it float32."""
    if program.watched_at is None or len(program.called_from) != 1 or program.under_autocast != program.called_from:
        return None
    models = half.watched(program.watched_at)
    return around_model_call.loss_in_float32(program.called_from[0], models, program.tensors)


def of_rows(program: Program, argument: str) -> str | None:
    """The rows left out in which an argument of the models' one call is not finite."""
    if program.watched_at is None or len(program.called_from) != 1:
        return None
    return around_model_call.finite_alone(program.called_from[0], half.watched(program.watched_at), argument)


def of_widened(module: str, program: Program) -> str | None:
    """A module converted to float32, before the line that calls ``watch``; None as in `of_kept`."""
    number, inner = of_which_model(module)
    return half.widened(program.watched_at, number or 0, inner) if program.watched_at is not None else None


def of_autocast(program: Program, dtype: str) -> str | None:
    """The autocast regions around the models' calls in another dtype, or switched off for ``float32``."""
    return around_model_call.in_dtype(program.under_autocast, dtype) if program.under_autocast else None


def of_weights(program: Program, near: HasPlace | None = None) -> str | None:
    """The model's weights made in float32, where all its calls are under autocast, or else in a function with a region.

    Args:
        program: Its lines.
        near: A line of the loop.
    """
    place = program.watched_at if near is None else near
    calls = program.called_from
    under = set(calls) == set(program.under_autocast) if calls else place and around_model_call.is_entered(place)
    return half.weights_in_float32(program.watched_at) if program.watched_at is not None and under else None


def of_scaler(program: Program, scale: float) -> str | None:
    """The scaler that ``watch`` is given, made with another first scale; None where that is not seen."""
    return (
        first_settings.with_scale(program.watched_at, scale) if program.watched_at is not None and scale > 0 else None
    )


def of_which_model(module: str) -> tuple[int | None, str]:
    """The number of the model among several, None where there is one, and a module's name in it."""
    found = _OF_SEVERAL.match(module)
    return (int(found[1]), found[2]) if found else (None, module)
