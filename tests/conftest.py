"""Without a GPU, Triton kernels run in Triton's interpreter, which must be set before Triton is imported."""

from __future__ import annotations

import gc
import importlib.util
import os

import hypothesis
import torch

# The same examples in every run; no time limit for one, since other tests keep the cores busy.
hypothesis.settings.register_profile(
    "fixed", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """Keeps the objects of all imported modules, about a million, out of later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets Python free the objects at exit: Triton prints a list of those of its own that are left."""
    gc.unfreeze()


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton") is not None:
        from tests.fast_interpreter import patch_interpreter

        patch_interpreter()
