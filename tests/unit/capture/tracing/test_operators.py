"""What is known of an op before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampscope.capture.tracing.operators import describe

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op",
    [
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.batch_norm_update_stats.default,
        aten.batch_norm_gather_stats.default,
        aten.batch_norm_gather_stats_with_counts.default,
    ],
    ids=str,
)
def test_the_statistics_of_a_normalisation_are_written_though_no_schema_says_so(op: Any) -> None:
    names = [argument.name for argument in op._schema.arguments]
    written = {names[position] for position in describe(op).written}
    assert written == {"running_mean", "running_var"}


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
