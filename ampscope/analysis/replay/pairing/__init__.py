"""Which op of one recording is which op of another, though modules were renamed, inserted or run in another dtype."""
