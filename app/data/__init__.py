"""Results of analysis for the pages, loaded once and kept."""
