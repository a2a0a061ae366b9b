"""``ampscope repro``: a failed op as a script of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError


def repro(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    incident: Annotated[
        int | None,
        typer.Option(help="Which incident of the diagnosis, from 1; the one it tells first if left out.", min=1),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The script to write.")] = Path("repro.py"),
    force: Annotated[bool, typer.Option("--force", help="Write over files that exist.")] = False,
) -> None:
    """Write a standalone script that shows an op failing, in its dtype and in a wider one, for a bug report.

    It needs a run that was recorded with ampscope.watch(..., save_tensors=True).
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.analysis.replay.reproducible import reproducible
    from ampscope.analysis.words import where_ranked
    from ampscope.report.repro import as_script
    from ampscope.trace.read.run import open_run

    beside = output.with_suffix(".safetensors")
    with open_run(named_or_newest(run)) as opened:
        diagnosis = diagnose(opened)
        found = reproducible(opened, diagnosis, incident)
        script = as_script(diagnosis.run, found, found.saved.content(), data_name=beside.name)
    _write(output, script.text.encode("ascii"), force=force)
    if script.data is not None:
        _write(beside, script.data, force=force)
    call = found.saved.call
    ranked = f" {where}" if (where := where_ranked(found.incident)) else ""
    typer.echo(
        f"Wrote {output}: {call.op} of incident {found.number}, step {call.step}{ranked}. Run it: python {output}"
    )
    if script.data is not None:
        typer.echo(f"Its operands are in {beside}; keep the two together.")


def _write(path: Path, content: bytes, *, force: bool) -> None:
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise AmpscopeError(f"{path} exists; choose another name with -o, or --force to write over it") from None
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None
