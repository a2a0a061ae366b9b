"""``ampscope repro``: the script it writes, from traces that may be anyone's, and what it says when it cannot."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ampscope.analysis.diagnosis.diagnosis
from ampscope.analysis.replay.reproducible import Reproducible, operands_of, reproducible
from ampscope.analysis.results import Incident, RunInfo
from ampscope.errors import NothingToReproduce, RunDamaged
from ampscope.report.repro import EMBEDDED_BYTES, as_script, operator_source
from ampscope.trace.files.saved_operands import SavedCall, read_operands
from ampscope.trace.read.run import open_run
from ampscope.trace.vocabulary import Severity
from tests.support.command import Command
from tests.support.saved_operands import MM, TENSORS, content, save
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.by_hand import BROKEN, LINE, RUN, node

assert isinstance(BROKEN.primary, Incident)
FIRST = replace(BROKEN.primary, step=3, last_step=5, op=MM.op, module=MM.module, path=(node(7, MM.op), node(9, "loss")))
OTHER = replace(FIRST, step=9, last_step=9, op="aten.log.default", module="", severity=Severity.WARNING, path=())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two incidents; the primary one is the second of them."""
    diagnosis = replace(BROKEN, incidents=(OTHER, FIRST), primary=FIRST)
    monkeypatch.setattr(ampscope.analysis.diagnosis.diagnosis, "diagnose", lambda _: diagnosis)
    monkeypatch.chdir(tmp_path)
    return TraceBuilder(tmp_path / "run").close()


def script(
    call: SavedCall, tmp_path: Path, *, versions: dict[str, str] | None = None, explanation: str = "Too large."
) -> str:
    facts = replace(RUN, versions=RUN.versions if versions is None else versions)
    return written(save(tmp_path, call=call), facts, explanation)


def written(path: Path, run: RunInfo = RUN, explanation: str = "Too large.") -> str:
    incident = replace(FIRST, explanation=explanation)
    return as_script(run, Reproducible(number=1, incident=incident, saved=read_operands(path)), path.read_bytes()).text


class TestTheVerb:
    def test_it_writes_the_primary_incident(self, ampscope: Command, run: Path) -> None:
        save(run)
        answer = ampscope("repro", run)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out == "Wrote repro.py: aten.mm.default of incident 2, step 3. Run it: python repro.py\n"
        text = Path("repro.py").read_text("ascii")
        assert "# line  train.py:47 in Attention.forward\n#       logits = q @ k.T\n# why   fp16_overflow: " in text
        assert 'OP(t["t0"], t["t1"])' in text
        ast.parse(text)

    def test_it_does_not_write_over_files_unless_told_to(self, ampscope: Command, run: Path) -> None:
        save(run)
        Path("mine.py").write_text("precious")
        answer = ampscope("repro", run, "-o", "mine.py")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == "ampscope: mine.py exists; choose another name with -o, or --force to write over it\n"
        assert Path("mine.py").read_text() == "precious"
        assert ampscope("repro", run, "-o", "mine.py", "--force").code == 0
        assert Path("mine.py").read_text() != "precious"

    def test_large_operands_go_beside_it(self, ampscope: Command, run: Path) -> None:
        tensors = {**TENSORS, "t0": ("U8", [EMBEDDED_BYTES], bytes(EMBEDDED_BYTES))}
        save(run, content(tensors=tensors))
        answer = ampscope("repro", run, "-o", "it.py")
        assert answer.out.splitlines()[1] == "Its operands are in it.safetensors; keep the two together."
        assert Path("it.safetensors").stat().st_size > EMBEDDED_BYTES
        assert "with_name('it.safetensors')" in Path("it.py").read_text("ascii")

    def test_a_run_without_operands(self, ampscope: Command, run: Path) -> None:
        answer = ampscope("repro", run)
        assert (answer.code, answer.out) == (2, "")
        assert "save_tensors=True" in answer.err
        assert not Path("repro.py").exists()

    def test_an_incident_whose_operands_were_not_kept(self, ampscope: Command, run: Path) -> None:
        save(run)
        answer = ampscope("repro", run, "--incident", 1)
        assert answer.code == 2
        assert "the operands of the incident at step 9 were not kept" in answer.err
        assert answer.err.endswith("kept are those of step 3\n")

    def test_an_incident_that_is_not_there(self, ampscope: Command, run: Path) -> None:
        answer = ampscope("repro", run, "--incident", 3)
        assert answer.code == 2
        assert answer.err.startswith("ampscope: there is no incident 3: the run has 1: step 9,")

    def test_damaged_operands(self, ampscope: Command, run: Path) -> None:
        path = save(run, content()[:-1])
        answer = ampscope("repro", run)
        assert answer.code == 2
        assert path.name in answer.err
        assert "cut off" in answer.err

    def test_a_healthy_run(self, ampscope: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        healthy = replace(BROKEN, incidents=(), primary=None)
        monkeypatch.setattr("ampscope.analysis.diagnosis.diagnosis.diagnose", lambda _: healthy)
        answer = ampscope("repro", run)
        assert answer.code == 2
        assert "nothing to reproduce" in answer.err

    def test_no_run(self, ampscope: Command, tmp_path: Path) -> None:
        assert ampscope("repro", tmp_path / "nowhere").code == 2


class TestWhichCall:
    """The call that belongs to an incident."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Any:
        return lambda **changed: read_operands(save(tmp_path, call=replace(MM, **changed)))

    def test_the_one_nearest_to_the_origin(self, saved: Any) -> None:
        origin, later, unrelated = saved(seq=7), saved(seq=9, op="aten.sum.default"), saved(seq=8)
        assert operands_of(FIRST, [later, unrelated, origin]) == origin
        assert operands_of(FIRST, [later, unrelated]) == later

    def test_a_repeat_of_it_at_a_later_step(self, saved: Any) -> None:
        place = {"file": LINE.file, "line": LINE.line}
        repeat = saved(step=5, seq=70, **place)
        assert operands_of(FIRST, [saved(step=6, seq=7, **place), repeat]) == repeat
        assert operands_of(FIRST, [saved(step=5, seq=71, op="aten.log.default", **place)]) is None

    def test_without_a_number_the_first_that_was_kept(self, run: Path) -> None:
        call = replace(MM, step=9, op="aten.log.default", module="", file=LINE.file, line=LINE.line)
        save(run, call=call)
        with open_run(run) as opened:
            diagnosis = replace(BROKEN, incidents=(FIRST, OTHER), primary=FIRST)
            assert reproducible(opened, diagnosis).number == 2


HOSTILE = "\"\"\"\n'''\rimport os; os.abort()\u2028\\\x00\x1b[2J{0}$op\"'; raise SystemExit #"


class TestHostileTraces:
    def test_text_of_the_trace_stays_text(self, tmp_path: Path) -> None:
        fields = ("module", "phase", "file", "function", "code", "autocast")
        columns: dict[str, Any] = dict.fromkeys(fields, HOSTILE)
        hostile = replace(MM, **columns, args=[{"tensor": "t0"}, {"tensor": "t1"}, "x"])
        tame = replace(MM, args=[*MM.args, "x"])
        versions = {"torch": HOSTILE, HOSTILE: HOSTILE}
        one = script(hostile, tmp_path, versions=versions, explanation=HOSTILE)
        other = script(tame, tmp_path, versions={"torch": "2.13.0"})
        assert one.isascii()
        assert shape_of(one) == shape_of(other)

    def test_words_among_the_arguments_are_literals(self, tmp_path: Path) -> None:
        one = script(replace(MM, args=[*MM.args, "import"], kwargs={"reduce": "import"}), tmp_path)
        other = script(replace(MM, args=[*MM.args, "x"], kwargs={"y": "x"}), tmp_path)
        assert shape_of(one) == shape_of(other)

    @pytest.mark.parametrize(
        ("op", "why"),
        [
            ("aten.from_file.default", "reads or writes a file"),
            ("aten.save.default", "reads or writes a file"),
            ("prim.rpc_async.default", "ops of torch itself"),
            ("_c10d_functional.all_reduce.default", "ops of torch itself"),
            ("load_library.mm.default", "ops of torch itself"),
            ("mine.fused.default", "ops of torch itself"),
        ],
    )
    def test_no_script_calls_what_does_not_compute(self, tmp_path: Path, op: str, why: str) -> None:
        with pytest.raises(NothingToReproduce, match=f"no script is made for {op}.*{why}") as refused:
            script(replace(MM, op=op, args=["x", True, 1000]), tmp_path)
        assert len(str(refused.value).splitlines()) == 1

    def test_nor_does_the_verb(self, ampscope: Command, run: Path) -> None:
        save(run, call=replace(MM, op="aten.from_file.default", args=["mine", True, 1000]))
        answer = ampscope("repro", run)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("ampscope: no script is made for aten.from_file.default: ")
        assert not Path("repro.py").exists()

    def test_every_op_of_torch_that_takes_a_file_is_refused(self) -> None:
        torch = pytest.importorskip("torch")
        schemas = torch._C._jit_get_all_schemas()
        named = {one.name for one in schemas if any("file" in argument.name for argument in one.arguments)}
        ops = [name.replace("::", ".") + ".default" for name in named if name.partition("::")[0] in {"aten", "prims"}]
        assert "aten.from_file.default" in ops
        for op in ops:
            with pytest.raises(NothingToReproduce):
                operator_source(op)

    @pytest.mark.parametrize(
        "op", ["aten.__and__.Tensor", "aten._softmax.default", "prims.convert_element_type.default"]
    )
    def test_what_computes_is_called(self, op: str) -> None:
        assert operator_source(op) == f"torch.ops.{op}"

    @pytest.mark.parametrize(
        "changed",
        [
            {"op": "aten.mm"},
            {"op": "os.system.default('x')"},
            {"op": "aten.mm.default\n"},
            {"op": "lambda.mm.default"},
            {"op": "aten.m\u00b2.default"},
            {"device": "cpu'"},
            {"args": [{"dtype": "float16)"}]},
            {"args": [{"layout": "__class__.x"}]},
            {"args": [{"float": "1.0"}]},
            {"args": [{"eval": "x"}]},
            {"args": [{"dtype": "float16", "more": 1}]},
            {"args": [{}]},
            {"args": [{"dtype": "load"}]},
            {"args": [{"layout": "hub"}]},
            {"args": [{"memory_format": "save"}]},
            {"args": ["../../outside"]},
            {"args": [HOSTILE]},
            {"kwargs": {"__class__": 1}},
            {"kwargs": {HOSTILE: 1}},
            {"op": "aten.__class__.mro"},
            {"op": "aten.mm.__init__"},
        ],
    )
    def test_what_is_no_call_is_refused(self, tmp_path: Path, changed: dict[str, Any]) -> None:
        with pytest.raises(RunDamaged, match="describes no call of a torch op"):
            script(replace(MM, **changed), tmp_path)


def shape_of(text: str) -> str:
    """A program without its constants and docstring."""
    tree = ast.parse(text)
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant):
            each.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize(
    ("argument", "source"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (1e-8, "1e-08"),
        ({"float": "-inf"}, "float('-inf')"),
        ([{"tensor": "t1"}, [1, 2]], 't["t1"], [1, 2]]'),
        ({"dtype": "float16"}, "dtype(torch.float16)"),
        ({"device": "cuda"}, "DEVICE"),
        ({"layout": "strided"}, "torch.strided"),
        ({"memory_format": "contiguous_format"}, "torch.contiguous_format"),
    ],
)
def test_arguments_as_source(tmp_path: Path, argument: Any, source: str) -> None:
    assert source in script(replace(MM, args=[argument], kwargs={}), tmp_path).partition("OP(")[2].partition("\n")[0]


def test_an_overload_may_be_called_like_a_keyword(tmp_path: Path) -> None:
    text = script(replace(MM, op="aten.random_.from", kwargs={"from": 0}), tmp_path)
    assert "OP = getattr(torch.ops.aten.random_, 'from')\n" in text
    assert "**{'from': 0}" in text
    ast.parse(text)


@pytest.mark.parametrize(
    ("call", "dtype", "title"),
    [
        (MM, "F16", "in float32"),
        (MM, "F32", "in float64"),
        (replace(MM, kwargs={"dtype": {"dtype": "bfloat16"}}), "F32", "in float32"),
    ],
)
def test_the_second_call_is_in_the_next_wider_dtype(tmp_path: Path, call: SavedCall, dtype: str, title: str) -> None:
    values = bytes({"F16": 4, "F32": 8}[dtype])
    path = save(tmp_path, content(call, {"t0": (dtype, [2, 1], values), "t1": (dtype, [1, 2], values)}))
    assert f'show("{title}", WIDER)' in written(path)


def test_on_another_device_if_there_is_one(tmp_path: Path) -> None:
    text = script(replace(MM, device="cuda"), tmp_path)
    assert 'DEVICE = "cuda" if torch.accelerator.is_available() and torch.cuda.is_available() else "cpu"\n' in text
