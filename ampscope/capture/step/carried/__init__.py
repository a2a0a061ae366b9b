"""Follows the tensors that a loop carries from step to step: banks, queues, normalisers, moving averages, states."""
