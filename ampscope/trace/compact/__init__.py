"""Compaction: a run at rest in fewer files, with every row as it was."""
