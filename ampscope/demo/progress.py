"""The progress bar of the demo's training scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[float, float], None]]:
    """A bar over ``steps`` steps; call what it gives after each of them, with the loss and the loss scale."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task(title, total=steps, told="")

        def tell(loss: float, scale: float) -> None:
            bar.update(task, advance=1, told=f"loss {loss:.3f}  scale {scale:g}")

        yield tell
