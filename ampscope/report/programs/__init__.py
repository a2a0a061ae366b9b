"""Results in the forms of other programs: continuous integrations, code hosts, trace viewers."""
