"""The debugger of a traced step: its track, its controls, lists of ops and modules, and the card of an op."""
