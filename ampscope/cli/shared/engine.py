"""The option ``--engine`` of the verbs that scan large tables."""

from __future__ import annotations

from typing import Annotated

import typer

DUCKDB = "duckdb"
EngineOption = Annotated[
    str,
    typer.Option(
        help="What queries the large tables: duckdb; spark, which is started for it; or a Spark Connect server.",
        metavar="duckdb|spark|sc://HOST:PORT",
    ),
]
