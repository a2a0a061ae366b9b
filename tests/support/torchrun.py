"""Starts a program on several ranks, with ``torchrun`` or without it, and ends it with all its processes."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.paths import ROOT

#: Forks ranks, and has imported by then what each of them needs; it ends with this process.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"])
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
    running = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**_environment(), **(variables or {})},
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


def on_ranks(module: str, *arguments: str | Path, ranks: int, limit: float = LIMIT) -> str:
    """Runs ``python -m module arguments...`` on several ranks, with what ``torchrun`` tells each and no launcher.

    For programs to which it is all the same who started them: a rank's imports take longer than its training, and a
    process that has made them forks each of these ranks. Arguments, result and errors are those of `torchrun`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
        running = [
            _SERVER.Process(
                target=_rank,
                args=(module, [*map(str, arguments)], printed.name),
                kwargs={**_environment(), **told, "LOCAL_WORLD_SIZE": str(ranks), "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in map(str, range(ranks))
        ]
        for process in running:
            process.start()
        deadline = time.monotonic() + limit
        for process in running:
            process.join(timeout=max(deadline - time.monotonic(), 0.0))
        late = [psutil.Process(process.pid) for process in running if process.is_alive()]
        _kill(late)
        for process in running:
            process.join()
        said = printed.read()
    assert not late, f"{module} was not over after {limit:.0f} s on {ranks} ranks:\n{said}"
    assert not any(process.exitcode for process in running), f"{module} failed on {ranks} ranks:\n{said}"
    return said


def _rank(module: str, arguments: Sequence[str], printed: str, **variables: str) -> None:
    """Is what a forked process does: it runs a module as ``python -m`` does, and prints into a file."""
    with Path(printed).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    faulthandler.enable()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _environment() -> dict[str, str]:
    """All ranks are here, whatever network there is; more threads than cores make small models slow."""
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **ours}


def _kill_all(launcher: int) -> None:
    """Kills a launcher and its ranks, which it starts in sessions of their own."""
    started = psutil.Process(launcher).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(launcher).kill()
    _kill(started)


def _kill(started: Sequence[psutil.Process]) -> None:
    """Kills ranks; each says where it was."""
    for process in started:  # a fatal signal that Python's fault handler answers with the stacks of all threads
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
