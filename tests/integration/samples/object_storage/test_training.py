"""A training whose run goes to a real S3 server: it ends well, is killed, or never calls close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ampscope
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from ampscope.trace.upload.spool import waiting
from tests.support.command import Command
from tests.support.paths import ROOT
from tests.support.stores.s3_server import BUCKET, S3Server

PROGRAM = """
import os, signal, sys, torch, ampscope
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scope = ampscope.watch(model, dir=sys.argv[1])
for step in range(5):
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[2] == "kill":
    scope.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def train(url: str, end: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, url, end],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_a_program_that_never_closes_sends_all_at_its_end(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/never/closed"
    done = train(url, "end")
    assert done.returncode == 0, done.stderr
    assert f"recording to {url}" in done.stderr
    assert waiting() == []
    with open_run(url) as run:
        assert [run.status] == ["closed"]
        assert len(run.rows(Table.STEPS)) == 5


@pytest.mark.slow
def test_what_a_kill_left_is_sent_and_gone_on_with(s3: S3Server, ampscope_command: Command) -> None:
    url = f"s3://{BUCKET}/killed/run"
    done = train(url, "kill")
    assert done.returncode == -signal.SIGKILL
    assert len(waiting()) == 1
    told = ampscope_command("upload")
    assert told.code == 0, told.err
    assert waiting() == []
    with open_run(url) as run:
        assert len(run.rows(Table.STEPS)) == 5
    done = train(url, "end")
    assert done.returncode == 0, done.stderr
    with open_run(url) as run:
        assert [row.step for row in run.rows(Table.STEPS)] == list(range(10))
        assert len(run.manifest.segments) == 2


@pytest.mark.slow
def test_a_training_goes_on_while_the_store_hangs(s3: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = ampscope.watch(model, dir=f"s3://{BUCKET}/hanging/run")
    s3.stall()
    assert s3.stalled.wait(30)
    for _ in range(50):
        model(torch.randn(2, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert s3.stalled.is_set()  # it has hung all the while
    s3.release()
    scope.close()
    with open_run(str(scope.folder)) as run:
        assert len(run.rows(Table.STEPS)) == 50


@pytest.mark.slow
def test_credentials_are_written_nowhere(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = "SECRET-of-the-user"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    done = train(f"s3://{BUCKET}/secret/run", "kill")
    spool = waiting()[0]
    written = [path.read_bytes() for path in spool.rglob("*") if path.is_file()]
    assert written
    assert not any(secret.encode() in content for content in written)
    assert secret not in done.stderr + done.stdout
