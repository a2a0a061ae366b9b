"""The benchmarks themselves: that they run, and would show what they are there to show."""
