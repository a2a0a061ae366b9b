"""What a run's tables are queried with: DuckDB in this process, or Spark where a fleet's traces outgrow one machine."""
