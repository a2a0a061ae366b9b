"""What is known of an op before it runs."""

from __future__ import annotations

import pytest
import torch

from ampscope.capture.tracing.operators import describe

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "passes_through"),
    [
        (aten.view.default, True),
        (aten._unsafe_view.default, True),
        (aten.unsafe_split.Tensor, True),
        (aten.unsafe_split_with_sizes.default, True),
        (aten.unsafe_split.Tensor_out, False),
        (aten._unsafe_index_put.default, False),
        (aten.clone.default, False),
    ],
    ids=str,
)
def test_a_view_writes_nothing_whether_or_not_its_schema_says_so(op: object, passes_through: bool) -> None:
    assert describe(op).passes_through is passes_through
