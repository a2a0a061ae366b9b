"""Running a step, or an optimizer's step, again: faithfully, or with one thing changed."""
