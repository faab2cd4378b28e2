"""Execute steps: PyTorch on any device, Triton kernels and CUDA graphs on a GPU."""
