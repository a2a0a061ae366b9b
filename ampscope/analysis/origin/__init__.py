"""From a traced step to the op that made the value that mattered, and why it did."""
