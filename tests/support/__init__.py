"""What the tests of several rooms share: builders, loops, verdicts made by hand."""
