"""One statement of someone's program with a cure in it: their words, and the cure in the place that was meant."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampscope.cures.catalogue import cure_form
from ampscope.cures.cure_form import CureForm
from ampscope.cures.rewriting.edit import Edit, diff_at, joined
from ampscope.cures.rewriting.found_call import Asked
from ampscope.cures.rewriting.names import NameScope
from ampscope.cures.rewriting.program.earlier_value import Named
from ampscope.cures.rewriting.source_file import HasPlace, Row
from ampscope.cures.rewriting.statement import Splice, Statement, statement


def rewritten(
    code: str, form: str, asked: Asked, *, row: int | None = None, scope: NameScope | None = None
) -> Edit | None:
    """A line of someone's program with a cure in it.

    Args:
        code: The line, or the whole statement where it goes over several.
        form: What is done to the call: a `Form`, or one that a later version has recorded.
        asked: The call, with what changes.
        row: Of a statement over several lines: on which of them the call is made, from 0.
        scope: Where the statement stands in its program; None where that is not at hand.

    Returns:
        The change; None where the line cannot be parsed, where it is not clear which call is meant, and where the
        line already does it.
    """
    parsed, cure = statement(code, row, scope), cure_form(form)
    if parsed is None or any(each is not None and math.isnan(each) for each in (asked.value, asked.was)):
        return None
    splices = cure.rewriting(parsed, asked) if cure.rewriting is not None else ()
    first: tuple[str, ...] = ()
    if cure.named is not None and not splices:
        first, splices = cure.named(parsed, asked)
    after = _spliced(parsed, splices, cure, asked)
    imports = parsed.needs(after, [each.partition(" = ")[0] for each in first]) if after is not None else None
    return Edit(code, after, imports, first) if after is not None and imports is not None else None


def _spliced(parsed: Statement, splices: Sequence[Splice], cure: CureForm, asked: Asked) -> str | None:
    """The statement with them; of calls inside each other, as ``log(log(x))``, the inner ones first."""
    inner = [each for each in splices if not any(other != each and _holds(each, other) for other in splices)]
    after = parsed.changed(inner) if inner else None
    if after is None or len(inner) == len(splices) or not cure.repeats or cure.rewriting is None:
        return after if len(inner) == len(splices) else None
    again = statement(after, parsed.row, parsed.scope)
    rest = cure.rewriting(again, asked) if again is not None else ()
    done = again is None or len(rest) >= len(splices)
    return None if done or again is None else _spliced(again, rest, cure, asked)


def _holds(one: Splice, other: Splice) -> bool:
    return one.start <= other.start and other.end <= one.end


def diff_of_form(place: HasPlace, form: str, asked: Asked) -> str | None:
    """A form of a call as a diff of the line that makes it, and of others where it takes them; None where it cannot be.

    Args:
        place: The line.
        form: As in `rewritten`.
        asked: The call, with what changes.
    """
    named: list[Named] = []
    cure = cure_form(form)

    def write(code: str, row: int | None, scope: NameScope | None) -> Edit | None:
        found = rewritten(code, form, asked, row=row, scope=scope)
        parsed = statement(code, row, scope) if found is None and cure.values is not None else None
        other = cure.values(parsed, place, asked) if parsed is not None and cure.values is not None else None
        if other is None:
            return found
        named[:] = other.named
        found = rewritten(other.code, form, asked, row=row, scope=scope)
        return found._replace(before=code, after=other.named_again(found.after)) if found is not None else None

    found = diff_at(place, write)
    if found is None:
        return cure.elsewhere(place, asked) if cure.elsewhere is not None else None
    earlier = [_of_earlier(place.file, each) for each in named]
    return joined([found, *earlier]) if earlier else found


def _of_earlier(file: str, named: Named) -> str | None:
    return diff_at(Row(file, named.line, named.code), lambda *_: named.edit)


def diff_of_forms(place: HasPlace, forms: Sequence[tuple[str, Asked]]) -> str | None:
    """Forms of several calls of one line as one diff; None where one cannot be written."""

    def write(code: str, row: int | None, scope: NameScope | None) -> Edit | None:
        after, imports = code, tuple[str, ...]()
        for form, asked in forms:
            found = rewritten(after, form, asked, row=row, scope=scope)
            if found is None or found.first:
                return None
            after, imports = found.after, (*imports, *found.imports)
        return Edit(code, after, imports)

    return diff_at(place, write)
