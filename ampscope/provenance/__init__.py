"""From the op records of a traced step and their dataflow edges to the origins that matter. Pure: no torch, no files.

The first NaN is often not the culprit. The walk starts at what matters (the loss, gradients, weights, buffers) and
follows non-finite values back to the ops whose operands were all finite and whose result was not.
"""

from ampscope.provenance.graph import Graph, has_nan, is_finite, op_name
from ampscope.provenance.lost_values import (
    FEWEST_VALUES,
    LOST_SHARE,
    DistinctValues,
    HowLost,
    LostMass,
    cancelled,
    collapsed,
    lost_mass,
)
from ampscope.provenance.parting import How, Parting, parting
from ampscope.provenance.silent_overflows import (
    Birth,
    Harmless,
    absorbed,
    harmless_births,
    hidden,
    hidden_beside,
    is_discarded,
    reaches_loss,
)
from ampscope.provenance.walk import Origin, is_deliberate, names_infinity, origins

__all__ = [
    "FEWEST_VALUES",
    "LOST_SHARE",
    "Birth",
    "DistinctValues",
    "Graph",
    "Harmless",
    "How",
    "HowLost",
    "LostMass",
    "Origin",
    "Parting",
    "absorbed",
    "cancelled",
    "collapsed",
    "harmless_births",
    "has_nan",
    "hidden",
    "hidden_beside",
    "is_deliberate",
    "is_discarded",
    "is_finite",
    "lost_mass",
    "names_infinity",
    "op_name",
    "origins",
    "parting",
    "reaches_loss",
]
