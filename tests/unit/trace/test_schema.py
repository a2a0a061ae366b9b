"""The schema's two faces, row types and Arrow columns, are one; and the writing side stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.trace.schema import ROW_TYPES, Source, Statistics, Table, arrow_schema, execution_of, source_of

HEAVY = {"torch", "duckdb", "narwhals", "plotly", "streamlit", "pandas", "pyarrow.dataset"}


@pytest.mark.parametrize("table", Table)
def test_columns_are_the_fields_of_the_row_type(table: Table) -> None:
    fields = list(ROW_TYPES[table]._fields)
    if table is Table.OPS:
        assert fields.pop() == "statistics"
        fields += Statistics._fields
    assert arrow_schema(table).names == fields


def test_every_table_has_its_own_row_type() -> None:
    assert list(ROW_TYPES) == list(Table)
    assert len(set(ROW_TYPES.values())) == len(Table)


def test_columns_that_may_be_null_are_those_that_say_so() -> None:
    nullable = {field.name for field in arrow_schema(Table.GRADS) if field.nullable}
    assert nullable == {"max_abs", "underflow", "unchanged"}


@pytest.mark.parametrize("optimizer", [0, 3])
@pytest.mark.parametrize("execution", Source)
def test_a_source_is_taken_apart_as_it_was_put_together(execution: Source, optimizer: int) -> None:
    assert execution_of(source_of(execution, optimizer)) == (execution, str(optimizer) if optimizer else "")


WRITE_AND_RESUME = """
import sys

class Witness:
    @staticmethod
    def find_spec(name, path=None, target=None):
        print(name)

sys.meta_path.insert(0, Witness)
from tests.support.trace_builder import TraceBuilder
from pathlib import Path

for _ in range(2):
    builder = TraceBuilder(Path(sys.argv[1]))
    builder.step()
    builder.param()
    builder.op(builder.site(), exp_counts=None)
    builder.edge(min=None)
    builder.close()
"""


def test_writing_tries_to_import_nothing_heavy(run_folder: Path) -> None:
    """`pyarrow.array` would import pandas, and `Table.group_by` a query engine."""
    command = [sys.executable, "-c", WRITE_AND_RESUME, str(run_folder)]
    asked = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert "pyarrow" in asked
    assert not HEAVY & set(asked)


def _loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split())


def test_the_writing_side_loads_nothing_heavy() -> None:
    assert not HEAVY & _loaded_by("ampscope.trace.write.writer")


def test_the_reading_side_loads_no_torch_and_no_plotting() -> None:
    loaded = _loaded_by("ampscope.trace.read.run")
    assert not (HEAVY - {"duckdb", "narwhals", "pyarrow.dataset"}) & loaded
    assert "duckdb" in loaded  # so that the test above can fail
