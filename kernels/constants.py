"""Sizes and functions that kernels and the engine share."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

PAGE_SIZE = 64  # token slots of a page of the KV cache: one key tile of attention
# By transformers' names, as in config.json; importing transformers' own table would import Triton.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
MAX_NODES = 63  # nodes of a plan: with the root, one bit each of a 64-bit ancestor mask
