"""Credentials that stand in a training's program, or in its errors, are nowhere in its run or in what is told of it."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest

from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.support.command import Command
from tests.support.training.small_loop import make_scaler, mlp

SECRETS = ("Zq7Rk2Wx9Lp4", "Hm5Tn8Vb3Jc6", "Df4Gy7Ku2Se9", "Xo6Wb1Nv8Qa3")
PROGRAM = """
    import torch, ampscope
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True, webhook="http://127.0.0.1:9/services/T0/{0}")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    def connect(x, password):
        return x
    for step in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(connect(torch.randn(4, 8), password="{1}")).square().mean()
            if step == 2:
                loss = loss + connect(torch.tensor(6e4, dtype=torch.float16) * 8, password="{1}")
        scaler.scale(loss).backward()
        scaler.step(optimizer, token="{2}") if step < 0 else scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    try:
        with scope:
            raise RuntimeError("cannot reach https://me:{3}@host/x")
    except RuntimeError:
        pass
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_they_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    file, folder = tmp_path / "train.py", tmp_path / "run"
    file.write_text(textwrap.dedent(PROGRAM).format(*SECRETS))
    names = {"model": mlp(), "scaler": make_scaler(), "folder": folder}
    runpy.run_path(str(file), names)
    with open_run(folder) as run:
        told = {table.value: str(run.rows(table)) for table in Table}
    told["manifest"] = (folder / "run.json").read_text()
    for verb in ("diagnose", "scale", "ranges"):
        told[verb] = command(verb, folder).out
        told[f"{verb} --json"] = command(verb, folder, "--json").out
    for name in ("report.html", "gate.sarif", "gate.xml", "gate.md"):
        where = tmp_path / name
        arguments = ("report", folder, "-o", where) if name == "report.html" else ("gate", folder)
        formats = {"gate.sarif": ("--sarif", where), "gate.xml": ("--junit", where), "gate.md": ("--markdown", where)}
        assert "Usage" not in command(*arguments, *formats.get(name, ())).err
        told[name] = where.read_text()
    assert "...redacted" in told["scaler_events"]
    assert "...redacted" in told["manifest"]
    assert "...redacted" in told["events"]
    assert "train.py" in told["diagnose"]
    leaks = [(name, secret) for name, text in told.items() for secret in SECRETS if secret in text]
    leaks += [
        (str(path.relative_to(folder)), secret)
        for path in folder.rglob("*")
        if path.is_file()
        for secret in SECRETS
        if secret.encode() in path.read_bytes()
    ]
    assert leaks == []
