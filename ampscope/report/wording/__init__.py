"""Results in sentences that the terminal and the pages share."""
