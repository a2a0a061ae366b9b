"""Builds traces for tests with the real writer and no torch; every column has a sensible default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ampscope.trace.manifest import Manifest
from ampscope.trace.schema import (
    EdgeRow,
    EventKind,
    EventRow,
    FindingRow,
    GradRow,
    IncidentRow,
    OpRow,
    ParamRow,
    Phase,
    ReplayRow,
    ReplayStatus,
    Row,
    ScalerAction,
    ScalerEventRow,
    SiteRow,
    Source,
    Statistics,
    StepRow,
    Table,
    Trigger,
)
from ampscope.trace.vocabulary import Cause
from ampscope.trace.write.writer import TraceWriter

R = TypeVar("R", bound=Row)

#: Unix time of step 0; one second per step.
START = 1_700_000_000.0


class TraceBuilder:
    """Adds rows one by one, each given by the columns that matter to the test; `close` returns the run's folder.

    Steps, sites and params number themselves when no number is given; ops too, within their step and source.
    """

    def __init__(self, folder: Path, *, rank: int = 0, **manifest: Any) -> None:
        facts = {"created": START, "name": folder.name, "device": "cpu", "model": "Net", "ampscope": "0.1.0"}
        self.folder = folder
        self.take(TraceWriter(folder, rank=rank, manifest=Manifest(**{**facts, **manifest})))

    @classmethod
    def of(cls, writer: TraceWriter) -> TraceBuilder:
        """Adds rows to a run that is open already."""
        builder = cls.__new__(cls)
        builder.folder = writer.folder
        builder.take(writer)
        return builder

    def take(self, writer: TraceWriter) -> None:
        self.writer = writer
        self._steps = dict(self.writer.resume.next_step)
        self._segment = self.writer.resume.segment
        self._sites = self.writer.resume.next_site
        self._params = self.writer.resume.next_param
        self._seq: dict[tuple[int, str], int] = {}

    def close(self) -> Path:
        self.writer.close()
        return self.folder

    def leave_open(self) -> Path:
        """Everything so far can be read, and the run is still being written; the test closes it in the end."""
        assert self.writer.flush()
        return self.folder

    def put(self, table: Table, row: Row) -> None:
        self.writer.put(table, [row])

    def step(self, **columns: Any) -> StepRow:
        optimizer = columns.get("optimizer", 0)
        step = columns.get("step", self._steps.get(optimizer, 0))
        self._steps[optimizer] = step + 1
        defaults = {
            "step": step,
            "optimizer": optimizer,
            "segment": self._segment,
            "time": START + step,
            "loss": 2.0,
            "scale": 65536.0,
            "growth_tracker": step,
            "found_inf": False,
            "skipped": False,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "micro_batches": 1,
            "duration_s": 0.1,
            "observing_s": 0.001,
            "traced": "",
        }
        return self._add(Table.STEPS, StepRow(**{**defaults, **columns}))

    def scaler_event(self, action: ScalerAction | str = ScalerAction.BACKOFF, **columns: Any) -> ScalerEventRow:
        defaults = {
            "step": 0,
            "segment": self._segment,
            "time": START + columns.get("step", 0),
            "scaler": 0,
            "optimizer": None,
            "action": action,
            "scale_before": 65536.0,
            "scale_after": 65536.0,
            "growth_tracker": 0,
            "detail": "",
            **_source_line(),
        }
        return self._add(Table.SCALER_EVENTS, ScalerEventRow(**{**defaults, **columns}))

    def param(self, name: str = "fc.weight", **columns: Any) -> int:
        """Add a parameter and return its id."""
        param: int = columns.get("param", self._params)
        self._params = max(self._params, param + 1)
        defaults = {
            "param": param,
            "kind": "parameter",
            "name": name,
            "module": name.rpartition(".")[0],
            "shape": "8x8",
            "dtype": "float32",
            "numel": 64,
            "requires_grad": True,
        }
        self._add(Table.PARAMS, ParamRow(**{**defaults, **columns}))
        return param

    def grad(self, **columns: Any) -> GradRow:
        defaults = {"step": 0, "optimizer": 0, "param": 0, "max_abs": 0.1, "nonfinite": False, "underflow": 0.0}
        return self._add(Table.GRADS, GradRow(**{**defaults, **columns}))

    def site(self, op: str = "aten.mm.default", **columns: Any) -> int:
        """Add a program point and return its id; of operands and outputs whose shapes are not given, those are 8x8."""
        site: int = columns.get("site", self._sites)
        self._sites = max(self._sites, site + 1)
        defaults = {
            "site": site,
            "op": op,
            "name": "",
            "module": "fc",
            "module_type": "Linear",
            "phase": Phase.FORWARD,
            **_source_line(),
            "in_dtypes": ("float16", "float16"),
            "in_shapes": ("8x8",) * len(columns.get("in_dtypes", "ab")),
            "out_dtypes": ("float16",),
            "out_shapes": ("8x8",) * len(columns.get("out_dtypes", "a")),
            "scalars": "{}",
            "autocast": "float16",
            "cast": "",
            "grad_fn": "",
            "forward_site": None,
        }
        self._add(Table.SITES, SiteRow(**{**defaults, **columns}))
        return site

    def op(self, site: int = 0, **columns: Any) -> int:
        """Add an executed op and return its sequence number."""
        where = (columns.get("step", 0), str(columns.get("source", Source.REPLAY)))
        seq: int = columns.get("seq", self._seq.get(where, 0))
        self._seq[where] = max(self._seq.get(where, 0), seq + 1)
        defaults = {
            "step": where[0],
            "source": where[1],
            "seq": seq,
            "out": 0,
            "site": site,
            "micro_batch": 0,
            "numel": 64,
            "min": -1.0,
            "max": 1.0,
            "nan": 0,
            "posinf": 0,
            "neginf": 0,
            "zeros": 0,
            "subnormals": 0,
            "max_finite": 1.0,
            "min_positive": 0.01,
            "exp_low": -7,
            "exp_counts": (1, 2, 4, 8, 16, 16, 16, 1),
        }
        self._add(Table.OPS, _op_row({**defaults, **columns}))
        return seq

    def edge(self, from_seq: int = 0, seq: int = 1, **columns: Any) -> EdgeRow:
        defaults = {
            "step": 0,
            "source": Source.REPLAY,
            "seq": seq,
            "arg": 0,
            "from_seq": from_seq,
            "from_out": 0,
            "in_place": False,
            "partial": False,
            "min": None,
            "max": None,
        }
        return self._add(Table.EDGES, EdgeRow(**{**defaults, **columns}))

    def incident(self, **columns: Any) -> IncidentRow:
        defaults = {
            "step": 0,
            "optimizer": 0,
            "segment": self._segment,
            "time": START + columns.get("step", 0),
            "trigger": Trigger.NONFINITE_GRADIENT,
            "loss": 2.0,
            "scale": 65536.0,
            "replay": ReplayStatus.EXACT,
            "replay_reason": "",
            "replay_s": 0.5,
            "bad_params": (),
            "over_budget": False,
            "evidence": "{}",
        }
        return self._add(Table.INCIDENTS, IncidentRow(**{**defaults, **columns}))

    def replay(self, change: str, outcome: str, **columns: Any) -> ReplayRow:
        defaults = {
            "step": 0,
            "optimizer": 0,
            "segment": self._segment,
            "time": START + columns.get("step", 0),
            "modules": (),
            "scale": None,
            "reason": "",
            "loss": None,
            "seconds": 0.25,
            "op_min": None,
            "op_max": None,
        }
        return self._add(Table.REPLAYS, ReplayRow(**{**defaults, "change": change, "outcome": outcome, **columns}))

    def finding(self, cause: Cause | str = Cause.MISUSE_CLIP_BEFORE_UNSCALE, **columns: Any) -> FindingRow:
        defaults = {
            "step": 0,
            "segment": self._segment,
            "time": START + columns.get("step", 0),
            "cause": cause,
            "form": "",
            **_source_line(),
            "evidence": "{}",
        }
        return self._add(Table.FINDINGS, FindingRow(**{**defaults, **columns}))

    def event(self, kind: EventKind | str = EventKind.NOTE, text: str = "", **columns: Any) -> EventRow:
        defaults = {"step": 0, "segment": self._segment, "time": START + columns.get("step", 0)}
        return self._add(Table.EVENTS, EventRow(**{**defaults, "kind": kind, "text": text, **columns}))

    def _add(self, table: Table, row: R) -> R:
        self.put(table, row)
        return row


def _op_row(columns: dict[str, Any]) -> OpRow:
    measured = {name: columns.pop(name) for name in Statistics._fields if name in columns}
    return OpRow(**columns, statistics=Statistics(**measured))


def _source_line() -> dict[str, Any]:
    return {"file": "train.py", "line": 10, "function": "train_step", "code": "out = model(x)"}
