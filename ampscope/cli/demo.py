"""``ampscope demo``: trains a small model until fp16 breaks it, and shows what AMPscope says about it."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from ampscope.errors import AmpscopeError


class Training(StrEnum):
    """The trainings that the demo offers."""

    GPT = "gpt"  #: attention logits outgrow fp16
    HEALED = "healed"  #: the same GPT with ``heal=True``, to its end, and in float32
    DIGITS = "digits"  #: a healthy run, interrupted and resumed


_NEEDED = {
    Training.GPT: {"torch": "torch"},
    Training.HEALED: {"torch": "torch"},
    Training.DIGITS: {"torch": "torch", "scikit-learn": "sklearn"},
}

#: What `ampscope.demo.healed` records, and the steps by which the two are compared.
_HEALED, _FLOAT32, _LAST = "healed", "float32", 50


def _named(package: str) -> str:
    """Returns the package's name as pip takes it."""
    return "'ampscope[torch]'" if package == "torch" else package


def demo(
    training: Annotated[
        Training,
        typer.Option(
            "--story",
            help="gpt: breaks after some hundred steps. healed: goes on, beside float32. digits: stays healthy.",
        ),
    ] = Training.GPT,
    folder: Annotated[Path, typer.Option("--dir", help="Where to record the run.")] = Path("ampscope_runs"),
    view: Annotated[bool, typer.Option("--view/--no-view", help="Open the app on the run afterwards.")] = True,
) -> None:
    """Train a small model under the watch of AMPscope, print the diagnosis, and open the app on the run."""
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.cli.output import show
    from ampscope.report.terminal.diagnosis_text import as_text

    run = _new_folder(folder, training)
    _train(training, run)
    show(as_text(diagnose(run / _HEALED if training is Training.HEALED else run)))
    if training is Training.HEALED:
        typer.echo(f"\n{_beside_float32(run)}")
    if not view:
        typer.echo(f"\nLook around: ampscope view {run}")
        return
    from ampscope.cli.view import open_app

    open_app(run)


def _beside_float32(folder: Path) -> str:
    """How the loss of the healed run ends, and that of the same training in float32."""
    from ampscope.analysis.overview.overview import overview
    from ampscope.trace.read.run import open_run

    ends = [fmean(overview(open_run(folder / name)).loss.values[-_LAST:]) for name in (_HEALED, _FLOAT32)]
    return (
        f"Loss of the last {_LAST} steps: {ends[0]:.3f} healed, {ends[1]:.3f} in float32 from the same seeds.\n"
        f"Both curves in one picture: ampscope view {folder}, page Compare"
    )


def _train(training: Training, run: Path) -> None:
    """Trains in a process of its own, as a user's script would."""
    missing = [name for name, module in _NEEDED[training].items() if importlib.util.find_spec(module) is None]
    if missing:
        raise AmpscopeError(
            f"this demo trains a model and needs {' and '.join(missing)}; pip install {' '.join(map(_named, missing))}"
        )
    try:
        code = subprocess.call([sys.executable, "-m", f"ampscope.demo.{training}", str(run)])
    except KeyboardInterrupt:
        raise AmpscopeError(f"the demo was interrupted; what it recorded is in {run}") from None
    if code:
        raise AmpscopeError(f"the demo's training stopped with exit code {code}; its own message is above")


def _new_folder(folder: Path, training: Training) -> Path:
    names = itertools.chain([f"demo-{training}"], (f"demo-{training}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / name for name in names) if not path.exists())
