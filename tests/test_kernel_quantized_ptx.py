"""The PTX of quantized weights inside a kernel, executed on the CPU: which weights it multiplies with."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from selfspec.kernels import quantized_format  # noqa: E402
from selfspec.kernels.lm_head_topk import lm_head_logits  # noqa: E402
from selfspec.kernels.triton_compat import INTERPRETED  # noqa: E402
from tests.ptx_interpreter import patch_interpreter_to_run_ptx  # noqa: E402
from tests.test_kernel_quantized import pack, quantized  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret in this process")

FORMATS = {  # kind, columns, columns of a group, offsets
    "int8 by row": ("int8", 176, 176, "none"),
    "int8": ("int8", 256, 128, "none"),
    "int8 zeros": ("int8", 192, 16, "zeros"),
    "int8 zero": ("int8", 256, 64, "constant"),
    "q5_1": ("int8", 256, 32, "minimums"),
    "q5_k": ("int8", 256, 32, "super"),
    "int8 zeros and minimums": ("int8", 144, 48, "zeros and minimums"),
    "fp8": ("fp8", 256, 128, "none"),
    "q4_0": ("int4", 160, 32, "constant"),
    "q4_1": ("int4", 256, 32, "minimums"),
    "q4_k": ("int4", 512, 32, "super"),
    "int4 zeros": ("int4", 384, 128, "zeros"),
    "int4 zeros and minimums by row": ("int4", 272, 272, "zeros and minimums"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_kernel_multiplies_with_exactly_the_rounded_weights(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of x that is 1 at one column gives that column of the weight."""
    monkeypatch.setattr(quantized_format, "INTERPRETED", False)
    patch_interpreter_to_run_ptx(monkeypatch)
    kind, width, group, offsets = FORMATS[name]
    weight = pack(quantized(21, width, kind, group, offsets))
    columns = torch.randperm(weight.columns, generator=torch.Generator().manual_seed(0))[:8]
    x = torch.zeros(8, weight.columns, dtype=dtype)
    x[torch.arange(8), columns] = 1
    logits = torch.full((8, 21), torch.nan)
    lm_head_logits(x, weight, logits)
    assert torch.equal(logits, weight.rounded(dtype)[:, columns].T.float())
