"""The training of `ampscope.demo.gpt`, to its end: with ``heal=True`` the overflow of its attention does not stop it.

The same is trained in float32 first, from the same seeds: what it would have come to without half precision.

Run it with ``ampscope demo --story healed``, or by itself: ``python -m ampscope.demo.healed FOLDER``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ampscope.demo.gpt import train

#: The two runs, in the folder that is given.
HEALED, FLOAT32 = "healed", "float32"


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train a small GPT in float32, and in fp16, healed where it breaks.")
    parser.add_argument("folder", type=Path, help="where to record the runs")
    torch.set_num_threads(1)  # the matrices are so small that a second thread only waits
    folder = parser.parse_args().folder
    train(folder / FLOAT32, full=True)
    train(folder / HEALED, heal=True)


if __name__ == "__main__":
    main()
