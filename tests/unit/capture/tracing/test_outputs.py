"""What a collective brings is looked at when the step reads it, for then the loop has waited; never before."""

from __future__ import annotations

import torch

from ampscope.capture.tracing.dataflow import Dataflow, StepOutputs
from ampscope.capture.tracing.executions import Made
from ampscope.capture.tracing.traced_rows import rows


def test_what_may_still_be_written_is_measured_when_it_is_read() -> None:
    outputs, awaited, unread = StepOutputs(full=False), torch.zeros(4), torch.zeros(4)
    outputs.add_late(Made(0, (4,)), [awaited])
    outputs.add_late(Made(1, (4,)), [unread])
    awaited.fill_(5.0)  # as another rank does, some time after the op has returned
    outputs.is_read(awaited)
    assert outputs.is_awaited(unread)
    (first, second), _ = rows(outputs, Dataflow(None), 0, "live")
    assert (first.min, first.max) == (5.0, 5.0)
    assert (second.min, second.max) == (None, None)
