"""The folder listing is the architecture: imports only go down, and no test module imports another."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import PACKAGE, ROOT, modules


@dataclass(frozen=True)
class Room:
    """What a part of the project may import, besides itself and the standard library."""

    ampscope: frozenset[str] = frozenset()  #: rooms, or modules of rooms
    others: frozenset[str] = frozenset()  #: top-level packages


def room(*, ampscope: str = "", others: str = "") -> Room:
    return Room(frozenset(ampscope.split()), frozenset(others.split()))


#: Every part of the project. ``ampscope`` is the front door, ``__init__.py``.
ROOMS = {
    "ampscope": room(ampscope="errors trace analysis capture"),
    "__main__": room(ampscope="cli"),
    "errors": room(),
    "notebook_repr": room(),
    "numerals": room(),
    "trace": room(
        ampscope="errors notebook_repr", others="pyarrow duckdb narwhals numpy fsspec pyspark sqlglot filelock"
    ),
    "provenance": room(ampscope="trace errors", others="numpy"),
    "forecast": room(ampscope="trace"),
    "cures": room(ampscope="numerals provenance trace", others="torch"),
    "capture": room(
        ampscope="ampscope errors trace provenance forecast cures", others="torch triton numpy pyarrow safetensors"
    ),
    "analysis": room(
        ampscope="errors notebook_repr numerals trace provenance forecast cures", others="pyarrow duckdb narwhals numpy"
    ),
    "report": room(ampscope="analysis trace errors numerals", others="rich"),
    "cli": room(
        ampscope="ampscope report analysis cures trace errors", others="typer rich mcp mcp_types pydantic duckdb"
    ),
    "demo": room(ampscope="ampscope", others="torch sklearn rich"),
    "integrations": room(
        ampscope=(
            "ampscope errors capture analysis.diagnosis report.terminal trace.schema trace.read trace.location "
            "trace.vocabulary"
        ),
        others="torch lightning pytorch_lightning transformers accelerate pytest rich",
    ),
    "app": room(
        ampscope=(
            "analysis report errors numerals trace.schema trace.dtypes trace.vocabulary trace.manifest trace.read "
            "trace.location"
        ),
        others="streamlit starlette plotly numpy",
    ),
}

#: The rooms inside each room, from the ground up: each may import those before it, and nothing else of that room.
FLOORS = {
    "ampscope.trace": (
        "dtypes schema vocabulary redaction evidence object_store location files manifest write upload read "
        "fleet_tables joined_parts compaction"
    ),
    "ampscope.capture": (
        "torch_support budgets keep_fp32 events hooks tracing isolation tape changes usage record rerun cures "
        "loop_state heal step checks assembly scope watch"
    ),
    "ampscope.capture.step": (
        "cycle own_work observers gradients sampled_step live_trace scaler_history verdict incidents attempts "
        "endings loop_endings failed_calls step_rows step_watch"
    ),
    "ampscope.capture.tracing": (
        "light_statistics exponent_histogram fused_kernel full_statistics batch_rows operators operand_keeper "
        "executions sites selection headroom sampled_shapes distinct_values dataflow traced_rows places "
        "running_code op_points tracer"
    ),
    "ampscope.cures": "call_form failed_op rewriting cure_form forms catalogue rewritten_statement",
    "ampscope.cures.rewriting": "names statement found_call literals source_file edit dtype_words program",
    "ampscope.cures.forms": (
        "log_versions logarithms exponentials variance constants products float32 empty_rows safe_where means bounds "
        "whole_step"
    ),
    "ampscope.analysis": (
        "results arrays rounding exponents tables words triggers step_graph op_facts causes cures usage "
        "scale overview precision diagnosis replay"
    ),
    "ampscope.report": (
        "safe_text numbers palette diagnosis_words precision_words json ci perfetto repro figures terminal html"
    ),
    "ampscope.report.html": (
        "markup bars_svg ops_svg stack_svg cards tables_html incident_sections report_page notebook"
    ),
    "app": "state data charts blocks app_pages workbench first_paint server_settings streamlit_app",
    "app.blocks": (
        "components text page_links figure table choices op_lists debugger verdict live_part scaler "
        "recorded_ranges sidebar top_bar other_runs"
    ),
}

#: The module of the app that knows no Streamlit: it turns results into figures.
CHARTS = ROOT / "app" / "charts.py"


def sources() -> Iterator[tuple[str, Path]]:
    """Every source file with the name of its room; an unknown part gives an unknown name."""
    for file in sorted(PACKAGE.rglob("*.py")):
        first = file.relative_to(PACKAGE).parts[0]
        yield ("ampscope" if first == "__init__.py" else first.removesuffix(".py")), file
    yield from (("app", file) for file in sorted((ROOT / "app").rglob("*.py")))


def imported(source: str) -> Iterator[str]:
    """The full names that a source imports, wherever in it, with a leading dot for a relative one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def offences(source: str, name: str, *, siblings: frozenset[str] = frozenset()) -> list[str]:
    """What a source in room ``name`` imports though it may not; ``siblings`` are the app's own modules."""
    if name not in ROOMS:
        return [f"{name} is a part that tests/test_architecture.py does not know: give it a place in ROOMS"]
    rules = ROOMS[name]
    found = []
    for full in imported(source):
        top, _, rest = full.partition(".")
        if not top:
            found.append(f"{full}: write the whole name instead of a relative import")
        elif top == "ampscope":
            if not _may_enter(rest, name, rules.ampscope):
                found.append(full)
        elif top not in sys.stdlib_module_names | rules.others | siblings:
            found.append(full)
    return found


def _may_enter(rest: str, name: str, allowed: frozenset[str]) -> bool:
    target, _, below = rest.partition(".")
    if target not in ROOMS:  # `import ampscope`, or a name that its front door gives
        return "ampscope" in allowed
    module = f"{target}.{below.partition('.')[0]}"
    return target == name or target in allowed or module in allowed


def loaded_with(source: str) -> Iterator[str]:
    """The packages that a source imports as it is imported itself, rather than in a function or for types."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (full.partition(".")[0] for full in imported(ast.unparse(node)))


@cache
def dependencies() -> dict[str, set[str]]:
    """Which of the project's modules each of them imports."""
    known = modules()
    return {name: set(_within(known, file, app=name.startswith("app"))) - {name} for name, file in known.items()}


def _within(known: dict[str, Path], file: Path, *, app: bool) -> Iterator[str]:
    for full in imported(file.read_text("utf-8")):
        home = "app." if app and not full.startswith("ampscope") else ""
        parts = f"{home}{full}".split(".")
        longest = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        yield from [name for name in longest if name in known][:1]


def child(folder: str, module: str) -> str | None:
    """The entry of ``folder`` that holds ``module``."""
    return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else None


def between(folder: str) -> dict[str, set[str]]:
    """Which entries of ``folder`` each of its entries imports."""
    found: dict[str, set[str]] = {}
    for module, needs in dependencies().items():
        here = child(folder, module)
        if here is not None:
            found.setdefault(here, set()).update(filter(None, (child(folder, need) for need in needs)))
            found[here].discard(here)
    return found


def siblings_of(file: Path) -> frozenset[str]:
    app = ROOT / "app"
    return frozenset(path.stem for path in app.iterdir()) if file.is_relative_to(app) else frozenset()


def upwards(folder: str) -> dict[str, set[str]]:
    """The entries of ``folder`` that import what is not below them, with what that is."""
    floors, found = FLOORS[folder].split(), between(folder)
    assert set(floors) == found.keys(), f"a new room in {folder} needs a floor in FLOORS"
    below = {name: set(floors[:number]) for number, name in enumerate(floors)}
    return {name: needs - below[name] for name, needs in found.items() if needs - below[name]}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The names that are left when what imports nothing that is left is taken away, again and again."""
    left = {name: set(needs) for name, needs in graph.items()}
    while True:
        leaves = {name for name in left if not left[name] & left.keys()}
        if not leaves:
            inner = {need for needs in left.values() for need in needs}
            return sorted(left.keys() & inner)
        left = {name: needs for name, needs in left.items() if name not in leaves}


def test_imports_only_go_down() -> None:
    """Between rooms, inside each, and nowhere in a circle; what draws figures knows no Streamlit."""
    of_rooms = {file: offences(file.read_text("utf-8"), name, siblings=siblings_of(file)) for name, file in sources()}
    assert {file: found for file, found in of_rooms.items() if found} == {}
    assert {folder: found for folder in FLOORS if (found := upwards(folder))} == {}
    folders = {name.rpartition(".")[0] for name in modules()} - {""}
    assert {folder: names for folder in folders if (names := circle(between(folder)))} == {}
    assert [name for name in imported(CHARTS.read_text("utf-8")) if name.startswith("streamlit")] == []


def test_forms_of_calls_are_read_without_torch() -> None:
    """Analysis reads them where there is none; they import it where they make a call."""
    files = (PACKAGE / "cures").rglob("*.py")
    assert [file for file in files if "torch" in loaded_with(file.read_text("utf-8"))] == []
    assert list(loaded_with("import torch.nn\nfrom torch import Tensor")) == ["torch", "torch"]
    assert list(loaded_with("if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch")) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": {"c"}, "d": {"a", "c"}}) == []


@pytest.mark.parametrize(
    ("name", "source", "offence"),
    [
        (
            "capture",
            "from ampscope.analysis.scale.scale_history import scale_history",
            "ampscope.analysis.scale.scale_history.scale_history",
        ),
        ("capture", "def f():\n    import duckdb", "duckdb"),
        ("analysis", "from ampscope.capture.tracing import tracer", "ampscope.capture.tracing.tracer"),
        ("analysis", "import torch.nn", "torch.nn"),
        ("analysis", "from ampscope import watch", "ampscope.watch"),
        ("report", "from ampscope.cli.main import main", "ampscope.cli.main.main"),
        ("cli", "if TYPE_CHECKING:\n    from torch import Tensor", "torch.Tensor"),
        ("errors", "import ampscope", "ampscope"),
        ("app", "from ampscope.trace.files.journal import Journal", "ampscope.trace.files.journal.Journal"),
        ("trace", "from .schema import Table", ".schema.Table: write the whole name instead of a relative import"),
        (
            "gadgets",
            "import os",
            "gadgets is a part that tests/test_architecture.py does not know: give it a place in ROOMS",
        ),
    ],
)
def test_an_offence_is_found(name: str, source: str, offence: str) -> None:
    assert offences(source, name) == [offence]


def test_no_part_is_only_on_paper() -> None:
    assert set(ROOMS) == {name for name, _ in sources()}


def imported_tests(source: str) -> list[str]:
    """What a source imports of test modules."""
    return [full for full in imported(source) if full.startswith("tests.") and ".test_" in full]


def test_no_test_module_is_imported() -> None:
    """What tests share lies in tests/support, or beside them in a module that is no test."""
    found = {file: imported_tests(file.read_text("utf-8")) for file in (ROOT / "tests").rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


def test_an_import_of_a_test_module_is_found() -> None:
    assert imported_tests("from tests.unit.cli.test_view import started") == ["tests.unit.cli.test_view.started"]
    assert imported_tests("from tests.unit.cli import test_view") == ["tests.unit.cli.test_view"]
    assert imported_tests("from tests.support.scenes import LONG") == []
