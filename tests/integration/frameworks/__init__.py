"""Where people train: each framework, number of ranks and way to compile, with a real model, healthy and failing."""
