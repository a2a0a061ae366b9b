"""The training of `ampscope.demo.gpt`, to its end: with ``heal=True`` the overflow of its attention does not stop it.

Run it with ``ampscope demo --story healed``, or by itself: ``python -m ampscope.demo.healed FOLDER``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ampscope.demo.gpt import train


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train a small GPT in fp16, healed where it breaks.")
    parser.add_argument("folder", type=Path, help="where to record the run")
    torch.set_num_threads(1)  # the matrices are so small that a second thread only waits
    train(parser.parse_args().folder, heal=True)


if __name__ == "__main__":
    main()
