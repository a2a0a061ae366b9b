"""Steps in which more happens than one forward and backward: closures, moved weights, exchanged layers."""
