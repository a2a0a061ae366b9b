"""``save_tensors=True`` and ``ampscope repro``: the op that failed, called again by a script of its own."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.replay.reproducible import reproducible
from ampscope.capture.record import operand_files
from ampscope.capture.tracing import operand_keeper
from ampscope.errors import NothingToReproduce, WatchError
from ampscope.report.repro import as_script
from ampscope.trace.files import saved_operands as kept
from ampscope.trace.files.saved_operands import operand_files as files_of
from ampscope.trace.files.saved_operands import read_operands
from ampscope.trace.schema import EventKind, Table
from tests.support.training.small_loop import WIDTH, make_scaler, mlp, train
from tests.support.training.twin_runs import train_both

Loss = Callable[[nn.Module, bool], Tensor]


class Tokens(nn.Module):
    """An embedding under a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


#: Comes from outside of every step.
SPOILT = torch.full((2, WIDTH), torch.nan)


def overflow(model: nn.Module, bad: bool) -> Tensor:
    return model(torch.full((2, WIDTH), 6e4 if bad else 1.0)).float().square().mean() * 1e-9


def log_of_zero(model: nn.Module, bad: bool) -> Tensor:
    probabilities = model(torch.ones(2, WIDTH)).float().softmax(-1)
    return -torch.log(probabilities * (0.0 if bad else 1.0)).mean()


def root_at_zero(model: nn.Module, bad: bool) -> Tensor:
    return torch.sqrt((model(torch.ones(2, WIDTH)).float() * (0.0 if bad else 1.0)) ** 2).sum()


def in_place(model: nn.Module, bad: bool) -> Tensor:
    y = model(torch.ones(2, WIDTH))
    y.mul_(6e5 if bad else 1.0).mul_(2.0)
    return y.float().mean()


def vanished_eps(model: nn.Module, bad: bool) -> Tensor:
    y = model(torch.ones(2, WIDTH)) * (0.0 if bad else 1.0)
    return torch.rsqrt(y.square().mean(-1) + 1e-8).float().mean() * 1e-3


def flushed_divisor(model: nn.Module, bad: bool) -> Tensor:
    y = model(torch.ones(2, WIDTH)) * 0.0 + (20.0 if bad else 1.0)
    return (1.0 / torch.exp(-y)).float().mean() * 1e-12


def to_half(model: nn.Module, bad: bool) -> Tensor:
    return (model(torch.ones(2, WIDTH)).float() * (1e6 if bad else 1.0)).half().float().mean()


def a_list_of_operands(model: nn.Module, bad: bool) -> Tensor:
    y = model(torch.ones(2, WIDTH)).float()
    return torch.cat([y, SPOILT if bad else y]).mean()


def masked_out(model: nn.Module, bad: bool) -> Tensor:
    mask = torch.zeros(2, WIDTH, dtype=torch.bool)
    mask[0] = bad
    return model(torch.ones(2, WIDTH)).float().masked_fill(mask, -torch.inf).softmax(-1).square().sum()


def lost_embedding(model: nn.Module, bad: bool) -> Tensor:
    if bad:
        with torch.no_grad():
            model.get_parameter("embed.weight")[2] = torch.inf
    return model(torch.tensor([0, 1, 2])).float().mean()


def run_of(loss_of: Loss, folder: Path, model: nn.Module | None = None, *, bad_steps: int = 1, **options: Any) -> Path:
    """Two healthy steps, then bad ones; returns the run's folder."""
    torch.manual_seed(0)
    if model is None:
        model = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(model.weight, 0.5)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), make_scaler()
    with ampscope.watch(model, scaler, dir=folder, quiet=True, **{"save_tensors": True, **options}):
        for step in range(2 + bad_steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, step > 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return folder


def script_of(folder: Path, target: Path) -> str:
    """Writes the script of a run's first incident, as ``ampscope repro`` does."""
    with ampscope.open_run(folder) as run:
        diagnosis = diagnose(run)
        found = reproducible(run, diagnosis)
        script = as_script(diagnosis.run, found, found.saved.path.read_bytes(), data_name="data.safetensors")
    target.write_text(script.text, "utf-8")
    if script.data is not None:
        target.with_name("data.safetensors").write_bytes(script.data)
    return found.saved.call.op


def said_by(script: Path) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue().splitlines()


CURED = "Reproduced: not finite in float16, finite in float32."
LOST = "Reproduced: not finite in float32, not finite in float64 either."


@pytest.mark.parametrize(("loss", "by"), [(vanished_eps, "aten.add.Tensor"), (flushed_divisor, "aten.exp.default")])
def test_an_operand_that_was_lost_before_the_call_is_told(
    loss: Loss, by: str, run_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "repro.py"
    script_of(run_of(loss, run_folder), script)
    text = script.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None
    assert docstring.endswith("What\nto change is upstream, not the dtype of this call.")
    assert f"# lost  An operand had already become 0 before this call, in float16 by {by}" in text
    *_, verdict, lost = said_by(script)
    assert verdict == "Reproduced: not finite in float16, not finite in float32 either."
    line = loss.__code__.co_firstlineno + 2
    assert (
        f"test_repro_scripts.py:{line}: from these operands the call fails in every dtype (in float32 from the" in lost
    )


def test_what_only_its_dtype_makes_fail_is_told_as_ever(run_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "repro.py"
    script_of(run_of(overflow, run_folder), script)
    assert "LOST = ''" in script.read_text("utf-8")
    assert "# lost" not in script.read_text("utf-8")
    assert said_by(script)[-1] == CURED


class TestScripts:
    @pytest.mark.parametrize(
        ("loss", "op", "verdict"),
        [
            (overflow, "aten.addmm.default", CURED),
            (log_of_zero, "aten.log.default", LOST),
            (root_at_zero, "aten.div.Tensor", LOST),
            (in_place, "aten.mul_.Tensor", CURED),
            (to_half, "aten._to_copy.default", CURED),
            (masked_out, "aten._softmax.default", LOST[:-1] + "; an operand is not finite itself."),
            (a_list_of_operands, "aten.cat.default", LOST[:-1] + "; an operand is not finite itself."),
        ],
    )
    def test_the_op_fails_again(self, loss: Loss, op: str, verdict: str, run_folder: Path, tmp_path: Path) -> None:
        script = tmp_path / "repro.py"
        assert script_of(run_of(loss, run_folder), script) == op
        said = said_by(script)
        assert said[0].startswith(f"{op} on cpu, torch {torch.__version__}")
        assert said[-1] == verdict

    def test_integer_operands_and_a_bad_weight(self, run_folder: Path, tmp_path: Path) -> None:
        script = tmp_path / "repro.py"
        assert script_of(run_of(lost_embedding, run_folder, Tokens()), script) == "aten.embedding.default"
        said = said_by(script)
        assert any(line.split()[:2] == ["t1", "int64"] for line in said)
        assert said[-1].endswith("; an operand is not finite itself.")

    def test_it_stands_alone(self, run_folder: Path, tmp_path: Path) -> None:
        """Large operands beside it, in a process that knows nothing of AMPscope."""
        folder = tmp_path / "elsewhere"
        folder.mkdir()

        def wide(model: nn.Module, bad: bool) -> Tensor:
            return model(torch.full((8192, WIDTH), 6e4 if bad else 1.0)).float().mean() * 1e-4

        script_of(run_of(wide, run_folder), folder / "repro.py")
        assert (folder / "data.safetensors").stat().st_size > 100_000
        blocked = (
            "import sys; sys.modules['ampscope'] = None; import runpy; runpy.run_path('repro.py', run_name='__main__')"
        )
        done = subprocess.run([sys.executable, "-c", blocked], cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == CURED

    def test_nothing_private_is_hidden_in_the_data(self, run_folder: Path) -> None:
        path = files_of(run_of(log_of_zero, run_folder))[0]
        content = path.read_bytes()
        assert b"test_repro_scripts.py" in content
        assert b"test_repro_scripts.py" not in kept.tensors_only(content)
        (path.parent / "stripped.safetensors").write_bytes(kept.tensors_only(content))
        from safetensors.torch import load_file

        before, after = load_file(path), load_file(path.parent / "stripped.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())


class TestWhatIsKept:
    def test_operands_are_as_they_were_before_the_op(self, run_folder: Path) -> None:
        path = files_of(run_of(in_place, run_folder))[0]
        from safetensors.torch import load_file

        saved, tensors = read_operands(path), load_file(path)
        assert saved.call.args == [{"tensor": "t0"}, 6e5]
        assert tensors["t0"].dtype is torch.float16
        assert tensors["t0"].isfinite().all()
        assert (saved.call.step, Path(saved.call.file).name) == (2, Path(__file__).name)
        assert saved.call.code == "y.mul_(6e5 if bad else 1.0).mul_(2.0)"

    def test_nothing_is_kept_unless_asked(self, run_folder: Path) -> None:
        folder = run_of(overflow, run_folder, save_tensors=False)
        assert files_of(folder) == []
        assert list(folder.rglob("*.safetensors")) == []
        with ampscope.open_run(folder) as run, pytest.raises(NothingToReproduce, match="save_tensors=True"):
            reproducible(run, diagnose(run))

    def test_nothing_is_kept_of_healthy_steps(self, run_folder: Path) -> None:
        assert files_of(run_of(masked_out, run_folder, bad_steps=0)) == []

    def test_a_failure_that_comes_again_is_kept_twice(self, run_folder: Path) -> None:
        folder = run_of(log_of_zero, run_folder, bad_steps=5)
        calls = [read_operands(path).call for path in files_of(folder)]
        assert [call.step for call in calls if call.phase == "loss"] == [2, 3]
        assert operand_files.MOST_REPEATS == 2
        with ampscope.open_run(folder) as run:
            assert len(run.rows(Table.INCIDENTS)) == 5

    def test_operands_that_are_too_large_are_not(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(operand_keeper, "MOST_BYTES", 16)
        folder = run_of(log_of_zero, run_folder)
        assert files_of(folder) == []
        with ampscope.open_run(folder) as run, pytest.raises(NothingToReproduce, match="too large"):
            reproducible(run, diagnose(run))

    def test_the_disk_budget_bounds_them(self, run_folder: Path) -> None:
        def large(model: nn.Module, bad: bool) -> Tensor:
            return (
                torch.log(model(torch.ones(16384, WIDTH)).float() * (0.0 if bad else 1e-3) + 0.0)
                .nan_to_num(neginf=-torch.inf)
                .mean()
            )

        assert files_of(run_of(large, run_folder, disk_budget=1 << 20)) == []
        assert files_of(run_of(large, run_folder.with_name("roomy"), disk_budget=8 << 20))

    def test_the_loop_computes_the_same(self, run_folder: Path) -> None:
        watched = train_both(lambda watch: train(watch, mlp()), run_folder, save_tensors=True)
        assert watched.warnings == []
        assert files_of(run_folder)

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (operand_files, "write_whole"),
            (operand_files, "Graph"),
            (operand_keeper, "_Packing"),
            (operand_keeper, "_bytes"),
        ],
    )
    def test_a_fault_ends_the_keeping_and_nothing_else(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(owner, name, full)
        with pytest.warns(RuntimeWarning, match="the keeping of operands switched itself off after OSError"):
            folder = run_of(log_of_zero, run_folder, bad_steps=2)
        with ampscope.open_run(folder) as run:
            assert [row.replay for row in run.rows(Table.INCIDENTS)] == ["exact", "exact"]
            assert len(run.rows(Table.EVENTS, kind=EventKind.WARNING)) == 1
        assert files_of(folder) == []


class TestErrors:
    def test_what_save_tensors_takes(self, run_folder: Path) -> None:
        with pytest.raises(WatchError, match="save_tensors=3: give True"):
            ampscope.watch(mlp(), dir=run_folder, save_tensors=3)  # type: ignore[arg-type]

    def test_safetensors_is_asked_for_at_once(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(WatchError, match="pip install safetensors"):
            ampscope.watch(mlp(), dir=run_folder, save_tensors=True)
        assert not run_folder.exists()
