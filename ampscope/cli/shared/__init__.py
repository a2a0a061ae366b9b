"""Holds what the verbs share: exit codes, finding the run that is meant, printing and writing."""
