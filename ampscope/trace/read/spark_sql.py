"""DuckDB's SQL as Spark's, the same in what it means: what is null, what is not a number, where counting begins."""

from __future__ import annotations

from functools import lru_cache

import sqlglot
from sqlglot import expressions as sql

from ampscope.trace.read.duckdb_engine import Query

#: Stands for the frame that is asked.
FRAME = "frame"


@lru_cache(maxsize=512)
def spark_text(query: Query) -> str:
    """The query as a format string of Spark's SQL, with `FRAME` as its one field."""
    text = f"SELECT {query.select} FROM {FRAME}"
    text += f" WHERE {query.where}" if query.where else ""
    if query.by:
        text += f" GROUP BY {query.by}"
        text = f"SELECT * FROM ({text})" + (f" WHERE {query.having}" if query.having else "")
    text += f" ORDER BY {query.order}" if query.order else ""
    text += f" LIMIT {query.limit}" if query.limit is not None else ""
    parsed = sqlglot.parse_one(text, dialect="duckdb").transform(_meant)
    written = parsed.sql(dialect="spark", identify=True).replace("{", "{{").replace("}", "}}")
    return written.replace(f"`{FRAME}`", f"{{{FRAME}}}")


def _meant(node: sql.Expression) -> sql.Expression:
    """One expression with the meaning that it has for DuckDB."""
    if isinstance(node, sql.IsNan):  # of null, Spark says false
        return sql.EQ(this=node.this, expression=_number("nan"))
    if isinstance(node, sql.ArgMax):  # Spark's answer may be null where the largest has none
        ranked = sql.Case().when(node.this.copy().is_(sql.null()).not_(), node.expression)
        return sql.Anonymous(this="max_by", expressions=[node.this, ranked])
    if isinstance(node, sql.Bracket):  # DuckDB counts from one, and says null outside
        return sql.Anonymous(this="try_element_at", expressions=[node.this, _from_one(node)])
    if isinstance(node, sql.Anonymous):
        return _function(node)
    return node


def _from_one(node: sql.Bracket) -> sql.Expression:
    """The place in a list as it was written; the parser has taken one from it where it was a number."""
    (place,) = node.expressions
    shift = 1 - int(node.args.get("offset") or 0) if isinstance(place, sql.Literal) else 0
    return sql.Literal.number(int(place.this) + shift) if shift else place


def _function(node: sql.Anonymous) -> sql.Expression:
    name, given = str(node.this).lower(), node.expressions
    if name == "isfinite":  # NaN lies above infinity for both engines, so that only finite numbers lie below
        return sql.LT(this=sql.Abs(this=given[0]), expression=_number("inf"))
    if name == "list_extract":
        return sql.Anonymous(this="try_element_at", expressions=given)
    if name == "hash":
        return _hash(given)
    return node


def _hash(given: list[sql.Expression]) -> sql.Expression:
    """Returns a hash of all expressions, nulls included, which Spark's own passes over."""
    known = [each for one in given for each in (one, sql.Is(this=one.copy(), expression=sql.null()))]
    return sql.Anonymous(this="xxhash64", expressions=known)


def _number(name: str) -> sql.Expression:
    return sql.cast(sql.Literal.string(name), "double")
