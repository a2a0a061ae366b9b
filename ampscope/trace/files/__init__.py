"""The files of a run: where they lie, how their bytes come about, and how one is never half there."""
