"""What a loop carries from step to step in tensors of its own: banks, queues, normalisers, moving averages, states."""
