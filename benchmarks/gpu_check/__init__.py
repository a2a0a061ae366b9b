"""What AMPscope promises of a GPU, checked on the GPU at hand: ``make gpu-check``."""
