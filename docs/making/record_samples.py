"""Runs samples and records what is diagnosed of them: ``make docs-samples``, or with the names of some.

Each ``samples/NAME.py`` is trained in a folder of its own; what ``ampscope diagnose`` prints of its run goes to
``recorded/NAME.txt``. One that begins with ``# torchrun`` is started so, with these options. Numbers are those of the
machine, so record again only what has changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.report.terminal.diagnosis_text import as_text

ROOT = Path(__file__).parents[2]
SAMPLES, RECORDED = (Path(__file__).with_name(name) for name in ("samples", "recorded"))
#: Characters in a line of the recorded text.
WIDTH = 88
#: A recorded run of the checkout whose diagnosis a page shows, too.
RUNS = {"attention_overflow": ROOT / "sample_logs" / "attention-overflow"}
#: How a run is named: by date and time, which the recorded text has not.
_STAMP = re.compile(r"\b\d{8}-\d{6}-")


def train(sample: Path, folder: Path) -> Path:
    """Trains one sample in ``folder``, which becomes the working directory, and returns its run's folder."""
    shutil.copy(sample, folder)
    first = sample.read_text("utf-8").partition("\n")[0]
    with contextlib.chdir(folder):
        if first.startswith("# torchrun "):
            _on_ranks(first.split()[2:])
        else:
            _here(sample.name)
    manifests = sorted(folder.rglob("run.json"), key=lambda manifest: manifest.stat().st_mtime)
    return manifests[-1].parent


def _here(name: str) -> None:
    """In this process, which sees to it that nothing is left of it."""
    import torch

    from ampscope.capture.scope import open_scopes

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(name)
        except RuntimeError:
            if name != "exception.py":
                raise
        finally:
            for scope in open_scopes():
                scope.close()
            torch.compiler.reset()


def _on_ranks(options: list[str]) -> None:
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    subprocess.run(command, env={**os.environ, **settings}, capture_output=True, check=True)


def printed(diagnosis: Diagnosis) -> str:
    """What ``ampscope diagnose`` prints."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False, markup=False, emoji=False).print(as_text(diagnosis))
    return "\n".join(line.rstrip() for line in _STAMP.sub("", text.getvalue()).strip().splitlines()) + "\n"


def main(names: list[str]) -> None:
    """Records those that are named, or all."""
    for name, run in RUNS.items():
        if not names or name in names:
            (RECORDED / f"{name}.txt").write_text(printed(ampscope.diagnose(run)), "utf-8")
    for sample in sorted(SAMPLES.rglob("*.py")):
        if names and sample.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            text = printed(ampscope.diagnose(train(sample, Path(folder))))
        recorded = RECORDED / sample.relative_to(SAMPLES).with_suffix(".txt")
        recorded.parent.mkdir(parents=True, exist_ok=True)
        recorded.write_text(text, "utf-8")
        sys.stdout.write(f"{sample.name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
