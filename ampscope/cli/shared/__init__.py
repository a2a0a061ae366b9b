"""What verbs have in common: exit codes, the run that is meant, what they print and write."""
