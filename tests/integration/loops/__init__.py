"""Training loops as people copy them from tutorials, and the tests that AMPscope watches them without touching them."""
