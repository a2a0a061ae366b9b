"""Records the sample runs beside this file, each from a training that really happens.

    python sample_logs/generate.py                   # all of them, about a minute
    python sample_logs/generate.py --only log-zero healthy

Trainings are seeded, so that the same torch on the same kind of machine records the same values; only times differ.
README.md tells each run's story, expected.json holds what its diagnosis must say.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the loops live with the tests that train them

import torch  # noqa: E402  # after the path is known
from torch import nn  # noqa: E402

import ampscope  # noqa: E402
from ampscope.trace.schema import MANIFEST  # noqa: E402

#: No sample may take more than this on disk, bytes.
LIMIT = 1_000_000


def healthy(folder: Path) -> None:
    from tests.integration.loops import digits

    # Every fifth step is traced, which gives the pages on precision and ranges something to show.
    _watched(folder, lambda watch: digits.train(watch, epochs=4, samples=None), every=5)


def attention_overflow(folder: Path) -> None:
    from ampscope.demo import gpt

    gpt.train(folder)
    _close(folder)


def log_zero(folder: Path) -> None:
    from tests.integration.loops import handwritten_loss

    # The operands of the op that failed are kept, so that a script can show the failure by itself.
    _watched(folder, handwritten_loss.train, save_tensors=True)


def clip_before_unscale(folder: Path) -> None:
    from tests.integration.loops import relation

    _watched(folder, lambda watch: relation.train_as_found(watch, steps=100))


SAMPLES: dict[str, Callable[[Path], None]] = {
    "healthy": healthy,
    "attention-overflow": attention_overflow,
    "log-zero": log_zero,
    "clip-before-unscale": clip_before_unscale,
}


def _watched(folder: Path, train: Callable[[Callable[[nn.Module, Any], object]], object], **options: Any) -> None:
    train(lambda model, scaler: ampscope.watch(model, scaler, dir=folder, **options))
    _close(folder)


def _close(folder: Path) -> None:
    """Close the scope that records into ``folder``, wherever the training keeps it."""
    from ampscope.capture.scope import open_scopes

    for scope in open_scopes():
        if scope.folder == folder:
            scope.close()


def record(name: str) -> int:
    """Record a sample anew; returns its bytes on disk."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    SAMPLES[name](folder)
    for lock in folder.rglob("*.lock"):
        lock.unlink()  # of use only while a process writes
    _name_no_kernel(folder / MANIFEST)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _name_no_kernel(manifest: Path) -> None:
    """A sample is for everyone to read: it names the kind of system, not the kernel that one machine runs."""
    content = json.loads(manifest.read_text())
    content["versions"]["platform"] = f"{platform.system()}-{platform.machine()}"
    manifest.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SAMPLES, default=list(SAMPLES), metavar="SAMPLE")
    torch.set_num_threads(1)  # sums come out the same on any number of cores
    for name in parser.parse_args().only:
        size = record(name)
        print(f"{name}: {size / 1000:.0f} kB")
        if size > LIMIT:
            print(f"{name} is larger than {LIMIT / 1000:.0f} kB", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
