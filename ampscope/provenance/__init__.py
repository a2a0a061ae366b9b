"""From the op records of a traced step and their dataflow edges to the origins that matter. Pure: no torch, no files.

The first NaN is often not the culprit. The walk starts at what matters (the loss, gradients, weights, buffers) and
follows non-finite values back to the ops whose operands were all finite and whose result was not.
"""

from ampscope.provenance.absorbed import absorbed, reaches_loss
from ampscope.provenance.births import Birth, Harmless, harmless_births
from ampscope.provenance.collapsed import FEWEST_VALUES, DistinctValues, collapsed
from ampscope.provenance.graph import Graph, has_nan, is_finite, op_name
from ampscope.provenance.hidden import hidden, hidden_beside
from ampscope.provenance.lost_mass import LOST_SHARE, HowLost, Loss, cancelled, lost_mass
from ampscope.provenance.parting import How, Parting, parting
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
    "Loss",
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
    "is_finite",
    "lost_mass",
    "names_infinity",
    "op_name",
    "origins",
    "parting",
    "reaches_loss",
]
