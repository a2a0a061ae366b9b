"""``ampscope audit``: what the layers of a healthy step lose by the dtype that they compute in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError


def audit(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    step: Annotated[int | None, typer.Option(help="Which audit; the newest if left out.", min=0)] = None,
    rank: Annotated[int | None, typer.Option(help="Whose; of the first audited rank if left out.", min=0)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Rank the layers of an audited step by what they lose to rounding, and divide the loss's error among them."""
    from ampscope.analysis.precision.audit import audit as audit_of
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.audit_text import as_text
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run)) as opened:
        if rank is not None and rank not in opened.ranks:
            raise AmpscopeError(f"rank {rank} has written nothing into this run")
        found = audit_of(opened, step=step, rank=rank)
        if found is None:
            whole = audit_of(opened, rank=rank)
            known = ", ".join(str(each.step) for each in whole.audited[-5:]) if whole is not None else ""
            raise AmpscopeError(f"step {step} was not audited; " + (f"audited are {known}" if known else "none was"))
    if json:
        typer.echo(as_json(found))
    else:
        show(as_text(found))
