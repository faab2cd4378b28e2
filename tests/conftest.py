"""Where there is no GPU, Triton kernels run in its interpreter; that has to be said before Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
