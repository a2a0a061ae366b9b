"""Running a step again: the tape of its calls, and replays of it, faithful or with one thing changed."""
