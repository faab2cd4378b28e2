"""The paged KV cache, its size, and the token layout of a pass."""
