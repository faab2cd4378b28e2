"""Steps as Triton kernels and CUDA graphs."""
