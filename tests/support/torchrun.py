"""Starts a program on several ranks as users do, with ``torchrun``, and ends it with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.paths import ROOT

#: No test waits longer than this for its ranks, in seconds: what takes 10 s alone takes a minute where ten others run.
LIMIT = 140.0


def torchrun(
    module: str,
    *arguments: str | Path,
    ranks: int,
    limit: float = LIMIT,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> str:
    """Runs ``python -m module arguments...`` on several ranks of this machine.

    Args:
        module: The program, as for ``python -m``; a file that ends in ``.py`` is run as a script.
        arguments: Its arguments, the same on every rank.
        ranks: How many processes.
        limit: Seconds after which all are killed.
        options: Further options of torchrun.
        variables: Further environment variables.

    Returns:
        What the ranks printed on standard output and standard error.

    Raises:
        AssertionError: A rank failed, or the program was not over in time; with what was printed, and then
            with where each thread of each rank was.
    """
    program = [module] if module.endswith(".py") else ["-m", module]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command = [*launcher, *program]
    # all ranks are here, whatever network there is; more threads than cores make small models slow
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**environment, "PYTHONFAULTHANDLER": "1", **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = running.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill_all(running.pid)
        printed, _ = running.communicate()
        raise AssertionError(f"{module} was not over after {limit:.0f} s on {ranks} ranks:\n{printed}") from None
    assert running.returncode == 0, f"{module} failed on {ranks} ranks:\n{printed}"
    return printed


def _kill_all(launcher: int) -> None:
    """Kills a launcher and its ranks, which it starts in sessions of their own; each rank says where it was."""
    started = psutil.Process(launcher).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(launcher).kill()
    for process in started:  # a fatal signal that Python's fault handler answers with the stacks of all threads
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
