"""WING A: what runs inside the training process; the only importer of torch."""
