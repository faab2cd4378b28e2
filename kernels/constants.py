"""Sizes that kernels, cache and scheduler share."""

PAGE_SIZE = 64  # positions of a page of the KV cache
MAX_NODES = 63  # of a plan: with the root, one bit each in a 64-bit ancestor mask
