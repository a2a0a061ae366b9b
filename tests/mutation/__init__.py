"""Right training loops, mechanical mutants of them, and an oracle that knows without AMPscope which are broken."""
