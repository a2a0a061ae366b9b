"""The debugger's pieces: track, keys, lists and the card of an op."""
