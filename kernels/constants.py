"""Sizes that kernels, cache and scheduler share."""

PAGE_SIZE = 64  # token slots of a page of the KV cache: one key tile of attention
MAX_NODES = 63  # nodes of a plan: with the root, one bit each of a 64-bit ancestor mask
