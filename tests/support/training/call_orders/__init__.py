"""Loops as people write them: each calls backward, ``unscale_``, ``step`` and ``update`` in an order of its own."""

from __future__ import annotations

from tests.support.training.call_orders import (
    autocast_regions,
    gradients_by_hand,
    hand_scales,
    micro_batches,
    restored_states,
    schedulers,
    several_scalers,
    unscaled_parts,
)
from tests.support.training.call_orders.registry import RIGHT, WRONG

__all__ = [
    "RIGHT",
    "WRONG",
    "autocast_regions",
    "gradients_by_hand",
    "hand_scales",
    "micro_batches",
    "restored_states",
    "schedulers",
    "several_scalers",
    "unscaled_parts",
]
