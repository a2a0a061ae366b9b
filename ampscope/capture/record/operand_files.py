"""Writes operands that a replay held into the run, for the ops at which what mattered was born."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ampscope import provenance
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.tracing.operand_keeper import MOST_BYTES, HeldCall, OperandKeeper
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import Graph
from ampscope.trace.files.saved_operands import SavedCall, as_metadata, operand_files, operands_path
from ampscope.trace.files.whole_files import write_whole
from ampscope.trace.schema import ENTRY_NODES

#: Ops kept from one incident, and from one program point over the run: a failure that comes again tells nothing new.
MOST_CALLS = 3
MOST_REPEATS = 2


class OperandFiles:
    """The operands kept with a run.

    Args:
        run: The run's folder.
        rank: Rank of this process.
        budget: Bytes they may take on the disk; 0 to keep none.
        guard: Catches faults of the keeping, a full disk among them.
    """

    def __init__(self, run: Path, rank: int, budget: int, guard: Guard) -> None:
        self._run = run
        self._rank = rank
        self._guard = guard
        self._left = budget - sum(path.stat().st_size for path in operand_files(run))
        self._repeats: Counter[tuple[object, ...]] = Counter()

    def keeper(self) -> OperandKeeper | None:
        """Makes the keeper that looks at the ops of the next replay; None when there is no room for more."""
        return OperandKeeper(self._guard) if self._left > 0 and not self._guard.broken else None

    def write(self, keeper: OperandKeeper, rows: TracedRows, *, optimizer: int) -> None:
        """Writes the operands of the ops at which what mattered was born.

        Args:
            keeper: What looked at the replay.
            rows: The records of the replay.
            optimizer: Number of the step's optimizer.
        """
        if self._guard.broken:
            return
        with self._guard:
            self._write(keeper, Graph(rows.ops, rows.edges, rows.sites.row), optimizer)

    def _write(self, keeper: OperandKeeper, graph: Graph, optimizer: int) -> None:
        room = min(MOST_BYTES, self._left)
        for seq in list(dict.fromkeys(_calls_at_origins(graph, keeper)))[:MOST_CALLS]:
            call, site = keeper.calls[seq], graph.site(seq)
            point = (site.op, site.module, site.phase, site.file, site.line)
            if call.bytes > room or self._repeats[point] >= MOST_REPEATS:
                continue
            self._repeats[point] += 1
            room -= call.bytes
            self._left -= self._save(graph, seq, call, optimizer).stat().st_size

    def _save(self, graph: Graph, seq: int, call: HeldCall, optimizer: int) -> Path:
        from safetensors.torch import save

        site, row = graph.site(seq), graph.output(seq)
        saved = SavedCall(
            step=row.step,
            optimizer=optimizer,
            seq=seq,
            source=row.source,
            op=site.op,
            module=site.module,
            phase=site.phase,
            file=site.file,
            line=site.line,
            function=site.function,
            code=site.code,
            autocast=site.autocast,
            device=call.device,
            args=call.args,
            kwargs=call.kwargs,
        )
        content = save(call.tensors, as_metadata(saved))
        path = operands_path(self._run, self._rank, row.step, seq)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda temporary: _write(temporary, content))
        return path


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _calls_at_origins(graph: Graph, keeper: OperandKeeper) -> Iterator[int]:
    """Kept calls at the origins; for a value from outside, at the op that read it first on the way to what mattered."""
    for origin in provenance.origins(graph) or provenance.absorbed(graph):
        seq = origin.seq
        if graph.site(seq).op in ENTRY_NODES and len(origin.path) > 1:
            seq = origin.path[1]
        same_point = (kept for kept, call in keeper.calls.items() if call.site == graph.output(seq).site)
        at = seq if seq in keeper.calls else next(same_point, None)
        if at is not None:
            yield at
