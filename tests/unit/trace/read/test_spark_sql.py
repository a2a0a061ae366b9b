"""DuckDB's words in Spark's."""

from __future__ import annotations

import pytest

from ampscope.trace.read.duckdb_engine import Query

pytest.importorskip("sqlglot")
from ampscope.trace.read.spark_sql import spark_text


@pytest.mark.parametrize(
    ("duckdb", "spark"),
    [
        ('max("max") FILTER (isfinite("max"))', "MAX(`max`) FILTER(WHERE ABS(`max`) < CAST('inf' AS DOUBLE))"),
        ("isnan(loss)", "`loss` = CAST('nan' AS DOUBLE)"),
        ("arg_max(site, size)", "MAX_BY(`site`, CASE WHEN NOT `site` IS NULL THEN `size` END)"),
        ("([4, 5])[rank + 1]", "TRY_ELEMENT_AT((ARRAY(4, 5)), `rank` + 1)"),
        ("([4, 5])[2]", "TRY_ELEMENT_AT((ARRAY(4, 5)), 2)"),
        ("list_extract([4]::BIGINT[], site + 1)", "TRY_ELEMENT_AT(CAST(ARRAY(4) AS ARRAY<BIGINT>), `site` + 1)"),
        ("hash(seq, site)", "XXHASH64(`seq`, `seq` IS NULL, `site`, `site` IS NULL)"),
        ("(step - 3) // 5", "(`step` - 3) DIV 5"),
        ("step >> 2", "SHIFTRIGHT(`step`, 2)"),
    ],
)
def test_an_expression_means_the_same(duckdb: str, spark: str) -> None:
    assert spark_text(Query(duckdb)) == f"SELECT {spark} FROM {{frame}}"


def test_groups_are_chosen_and_sorted_by_the_names_of_what_is_selected() -> None:
    query = Query("step, count(*) AS n", "source = '{live}'", "step", "n > 1", "step DESC, n", 4)
    assert spark_text(query) == (
        "SELECT * FROM (SELECT `step`, COUNT(*) AS `n` FROM {frame} WHERE `source` = '{{live}}' GROUP BY `step`) "
        "WHERE `n` > 1 ORDER BY `step` DESC, `n` NULLS LAST LIMIT 4"
    )
