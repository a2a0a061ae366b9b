"""The archives that are released, used as their users will: ``archives_in_use.py dist``; see ``make dist``.

Each is installed into an environment of its own, outside the checkout: the wheel alone with every Python that it
supports and that is here, then with each extra, then the sdist. The samples are read, a model is trained, the app is
served, an assistant's client asks, and the demo is run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_logs" / "attention-overflow"
VERSIONS = ("3.11", "3.12", "3.13")
_TRAIN = """
import torch, ampscope
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=1e-3)
ampscope.watch(model, scaler, dir="run")
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_ASK = """
import asyncio, sys
from mcp import Client, StdioServerParameters

async def ask():
    async with Client(StdioServerParameters(command=sys.argv[1], args=["mcp", sys.argv[2]])) as client:
        told = await client.call_tool("diagnose", {"run": "attention-overflow"})
        assert told.content[0].text.startswith("PROBLEM"), told

asyncio.run(ask())
"""


class Environment:
    """An environment with one archive in it.

    Args:
        folder: Where it is; commands run in an empty folder beside it.
        python: The interpreter that makes it.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self._bin = folder / "environment" / "bin"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        subprocess.run([python, "-m", "venv", folder / "environment"], check=True)

    def install(self, archive: Path, extra: str) -> None:
        """Installs an archive with an extra, in the versions that the tests know."""
        wanted = f"{archive}[{extra}]" if extra else str(archive)
        pinned = ["--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([self._bin / "python", "-m", "pip", "install", *pinned, wanted], check=True)

    def run(self, name: str, *arguments: object, code: int = 0) -> str:
        """The output of a program of the environment.

        Raises:
            AssertionError: it ended with another exit code.
        """
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(self._bin / name), *map(str, arguments)]
        found = subprocess.run(command, cwd=self.work, env=clean, capture_output=True, text=True, check=False)
        assert found.returncode == code, f"{command} ended with {found.returncode}\n{found.stdout}\n{found.stderr}"
        return found.stdout

    @contextmanager
    def serving(self, *arguments: object) -> Iterator[None]:
        """A program that serves until the end of the block."""
        command = [str(self.ampscope), *map(str, arguments)]
        server = subprocess.Popen(command, cwd=self.work, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # the app is a process of its own
            server.wait()

    @property
    def ampscope(self) -> Path:
        """The command."""
        return self._bin / "ampscope"


def reads(environment: Environment) -> None:
    """A trace is diagnosed without torch, and looked at by every verb that only reads."""
    assert environment.run("ampscope", "diagnose", SAMPLE, code=1).startswith("PROBLEM")
    _lacks_torch(environment)
    healthy = SAMPLE.parent / "healthy"
    for verb in ("ranges", "scale", "plan", "audit", "fix"):
        assert environment.run("ampscope", verb, SAMPLE)
    assert "attention-overflow" in environment.run("ampscope", "runs", SAMPLE.parent)
    environment.run("ampscope", "compare", SAMPLE, healthy, code=1)
    environment.run("ampscope", "gate", SAMPLE, "--max-skipped", "1%", code=1)
    environment.run("ampscope", "report", SAMPLE, "-o", "report.html")
    environment.run("ampscope", "perfetto", SAMPLE)
    environment.run("ampscope", "compact", SAMPLE, "--dry-run")
    environment.run("ampscope", "schema")
    environment.run("ampscope", "view", SAMPLE, code=2)
    environment.run("ampscope", "demo", code=2)


def _lacks_torch(environment: Environment) -> None:
    assert environment.run("python", "-c", "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"


def brings(module: str) -> Callable[[Environment], None]:
    """What is tried with an extra that brings a library for one thing: it is there, and traces are read beside it."""

    def trial(environment: Environment) -> None:
        environment.run("python", "-c", f"import {module}, ampscope.cli.main")
        assert environment.run("ampscope", "diagnose", SAMPLE, code=1).startswith("PROBLEM")

    trial.__doc__ = f"{module} is imported, and a trace is diagnosed beside it."
    return trial


def trains(environment: Environment) -> None:
    """A loop is watched."""
    (environment.work / "train.py").write_text(_TRAIN)
    environment.run("python", "train.py")
    assert environment.run("ampscope", "diagnose", "run").startswith("HEALTHY")


def serves(environment: Environment) -> None:
    """The app answers, without torch."""
    _lacks_torch(environment)
    port = 8599
    with environment.serving("view", SAMPLE, "--port", port):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for attempt in range(200):
            try:
                assert opener.open(f"http://localhost:{port}/_stcore/health", timeout=5).read() == b"ok"
                return
            except OSError:
                assert attempt < 199, "the app was not served within 200 attempts"
                environment.run("python", "-c", "import time; time.sleep(0.2)")


def is_asked(environment: Environment) -> None:
    """An assistant's client gets a diagnosis."""
    environment.run("python", "-c", _ASK, environment.ampscope, SAMPLE.parent)


def shows_the_demo(environment: Environment) -> None:
    """The demo breaks, and is diagnosed."""
    assert "PROBLEM" in environment.run("ampscope", "demo", "--no-view")


#: What is tried with each extra.
TRIALS: dict[str, Callable[[Environment], None]] = {
    "torch": trains,
    "app": serves,
    "mcp": is_asked,
    "s3": brings("s3fs"),
    "spark": brings("pyspark.sql.connect.session"),
    "tensorboard": brings("tensorboard"),
    "wandb": brings("wandb"),
    "mlflow": brings("mlflow"),
    "otel": brings("opentelemetry.sdk.metrics"),
    "docs": brings("mkdocs, mkdocstrings"),
    "all": shows_the_demo,
}


def interpreter(version: str) -> str | None:
    """An interpreter of a version, in the PATH or one of pyenv's; None where there is none.

    A shim in the PATH may name one that does not run.
    """
    known = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    found = [shutil.which(f"python{version}"), *map(str, known)]
    return next((each for each in found if each and _runs(each)), None)


def _runs(python: str) -> bool:
    return not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode


def main(folder: Path) -> None:
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    used: list[tuple[Path, str, str, Callable[[Environment], None]]] = []
    pythons = {version: interpreter(version) for version in VERSIONS}
    used += [(wheel, "", python, reads) for python in pythons.values() if python]
    missing = [version for version, python in pythons.items() if python is None]
    sys.stdout.write(f"There is no Python {' and no '.join(missing)} here.\n" if missing else "")
    used += [(wheel, extra, sys.executable, trial) for extra, trial in TRIALS.items()]
    used += [(sdist, "", sys.executable, reads)]
    for archive, extra, python, trial in used:
        with tempfile.TemporaryDirectory() as home:
            environment = Environment(Path(home), python)
            environment.install(archive.resolve(), extra)
            trial(environment)
        sys.stdout.write(f"{archive.name}[{extra}], {python}: {trial.__doc__}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
