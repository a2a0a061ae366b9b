"""A run that goes on: what was proved on a bad step is done to the live training, told, and taken back again."""
