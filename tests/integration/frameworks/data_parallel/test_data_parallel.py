"""``DistributedDataParallel``: which rank's own step went bad, which ranks received it; training goes on unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ampscope  # noqa: E402  # after the check that torch is there
from ampscope import provenance  # noqa: E402
from ampscope.trace.evidence import Evidence  # noqa: E402
from ampscope.trace.read.run import Run  # noqa: E402
from ampscope.trace.schema import IncidentRow, Node, Phase, ReplayStatus, Table  # noqa: E402
from tests.integration.frameworks.data_parallel.settings import BAD, SETTINGS  # noqa: E402
from tests.support.torchrun import on_ranks  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

PROGRAM = "tests.integration.frameworks.data_parallel.train"
#: On so many ranks, what is trained together.
TOGETHER = [
    (2, ("fp16", "bf16", "everywhere", "backward", "accumulated")),
    (2, ("static", "checkpointed", "unused", "views", "compressed")),
    (2, ("by hand", "compiled", "inner", "uneven", "buffers", "buffers within")),
    (3, ("fp16", "accumulated")),
]


@dataclass(frozen=True)
class Origin:
    """The op at which a setting fails; it is a square's product where nothing else is said."""

    op: str = "aten.mul.Tensor"
    module: str = "1"
    phase: Phase = Phase.FORWARD


#: Where a setting fails; None where no rank's own calculation does, but the reduction.
ORIGINS: dict[str, Origin | None] = {
    **dict.fromkeys(SETTINGS, Origin()),
    "backward": Origin("aten.div.Tensor", phase=Phase.BACKWARD),
    "checkpointed": Origin(module="0.inner.1"),
    "unused": Origin(module="square"),
    **dict.fromkeys(("buffers", "buffers within"), Origin(module="2")),
    "compressed": None,
}


@pytest.mark.parametrize(("ranks", "names"), TOGETHER, ids=lambda value: value if isinstance(value, int) else value[0])
def test_ranks(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    printed = on_ranks(PROGRAM, tmp_path, *names, ranks=ranks, limit=240.0)
    for name in names:
        for kind in ("healthy", "failing"):
            identical(tmp_path / name, kind, ranks)
        healthy(tmp_path / name / "healthy", name, ranks)
        failing(tmp_path / name / "failing", name, ranks)
        told_once(printed, tmp_path / name, name)


def identical(folder: Path, kind: str, ranks: int) -> None:
    """Losses, weights and scale are those of the same training unwatched."""
    for rank in range(ranks):
        digests = json.loads((folder / f"{kind}-{rank}.json").read_text())
        assert digests["watched"] == digests["unwatched"], (folder.name, kind, rank)


def healthy(folder: Path, name: str, ranks: int) -> None:
    assert ampscope.diagnose(folder).verdict == "healthy"
    run = ampscope.open_run(folder)
    assert run.ranks == list(range(ranks))
    assert run.manifest.world_size == ranks
    assert run.rows(Table.INCIDENTS) == []
    for rank in run.ranks:
        assert len(run.rows(Table.STEPS, rank=rank)) == SETTINGS[name].steps(last=rank == ranks - 1), (name, rank)
    assert run.rows(Table.OPS, rank=0)
    assert not any(run.rows(Table.OPS, rank=rank) for rank in range(1, ranks)), "one rank's healthy steps are enough"


def failing(folder: Path, name: str, ranks: int) -> None:
    run, setting, origin = ampscope.open_run(folder), SETTINGS[name], ORIGINS[name]
    first = [row for rank in range(ranks) for row in run.rows(Table.INCIDENTS, rank=rank, step=BAD)]
    assert len(first) == ranks, name
    for rank, row in enumerate(first):
        bad_itself = setting.everywhere or (rank == ranks - 1 and origin is not None)
        assert row.replay == (ReplayStatus.EXACT if bad_itself else ReplayStatus.RECEIVED), (name, rank, row)
        if bad_itself:
            assert where(run, rank) == origin, name
        else:
            received(row, name, overflows=origin is None and rank == ranks - 1, ranks=ranks)
    if setting.scale is None:
        poisoned(run, ranks)
    elif not setting.everywhere:
        assert run.rows(Table.REPLAYS, rank=0) == [], "nothing that a rank does otherwise cures what it received"
    assert ampscope.diagnose(folder).verdict == "problem"


def poisoned(run: Run, ranks: int) -> None:
    """Without a scaler the optimizer wrote what was received into the weights of all ranks."""
    for rank in range(ranks):
        (row,) = run.rows(Table.INCIDENTS, rank=rank, step=BAD + 1)
        assert row.replay == ReplayStatus.EXACT
        assert where(run, rank, BAD + 1).op == Node.PARAMETER


def received(row: IncidentRow, name: str, *, overflows: bool, ranks: int) -> None:
    reduction = Evidence.of(row).reduction
    assert reduction is not None
    assert reduction.ranks == ranks
    assert reduction.by == ("" if SETTINGS[name].sum_by_hand else "DistributedDataParallel")
    assert reduction.hook == ("fp16_compress_hook" if SETTINGS[name].hook else "")
    assert reduction.dtype == ("float16" if SETTINGS[name].hook else "float32")
    assert reduction.overflows is overflows
    assert (reduction.largest > torch.finfo(torch.float16).max) is overflows
    assert ("ends at 65504" in row.replay_reason) is overflows


def where(run: Run, rank: int, step: int = BAD) -> Origin:
    """The first origin in the replay of a step."""
    rows = {"step": step, "source": "replay", "rank": rank}
    sites = {row.site: row for row in run.rows(Table.SITES, rank=rank)}
    graph = provenance.Graph(run.rows(Table.OPS, **rows), run.rows(Table.EDGES, **rows), sites.__getitem__)
    site = graph.site(provenance.origins(graph)[0].seq)
    return Origin(site.op, site.module, Phase(site.phase))


def told_once(printed: str, folder: Path, name: str) -> None:
    """One rank says where the run goes, and of the step one line: by a rank on which it went wrong, if any did."""
    lines = [line for line in printed.splitlines() if f"{folder}/" in line]
    assert len([line for line in lines if "recording to" in line]) == 2, name  # a healthy and a failing run
    told = [line for line in lines if f"step {BAD}: " in line]
    if name == "backward":
        assert told == []  # a scaler's first skips for gradients are how it finds its scale
    else:
        assert len(told) == 1, (name, told)
        assert "rank " in told[0]
        assert ("lost in the reduction itself" if ORIGINS[name] is None else "replay: exact") in told[0]
