"""Rows of audits for tests, each given by the columns that matter."""

from __future__ import annotations

from typing import Any

from ampscope.trace.schema import AuditOpRow, AuditRow, AuditStatus, Source, Table
from tests.support.trace_builder import TraceBuilder


def audit_row(**columns: Any) -> AuditRow:
    defaults = {
        "step": 0,
        "optimizer": 0,
        "segment": 0,
        "time": 0.0,
        "dtype": "float32",
        "status": AuditStatus.DONE,
        "reason": "",
        "source": Source.AUDIT,
        "loss": 2.01,
        "reference_loss": 2.0,
        "explained": 0.009,
        "ops": 2,
        "not_measured": 0,
        "not_measured_ops": (),
        "seconds": 0.5,
    }
    return AuditRow(**{**defaults, **columns})


def op_row(site: int, **columns: Any) -> AuditOpRow:
    defaults: dict[str, Any] = dict.fromkeys(AuditOpRow._fields)
    defaults |= {"step": 0, "source": Source.AUDIT, "seq": site, "out": 0, "site": site, "micro_batch": 0}
    return AuditOpRow(**{**defaults, **columns})


def audited(trace: TraceBuilder, rows: list[AuditOpRow], **columns: Any) -> None:
    """Writes an audit with its ops."""
    for row in rows:
        trace.put(Table.AUDIT_OPS, row)
    trace.put(Table.AUDITS, audit_row(**{"ops": len(rows), **columns}))
