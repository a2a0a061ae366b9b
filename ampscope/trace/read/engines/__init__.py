"""Queries a run's tables: with DuckDB in this process, or with Spark where a fleet's traces outgrow one machine."""
