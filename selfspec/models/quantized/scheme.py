"""How a quantized checkpoint stores its weights: a Format gives each module a Scheme, or None if it stays in 16 bit.

`config` reads a Format from config.json; `checkpoint` checks and reads the tensors of a module by its Scheme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_LINEAR = re.compile(r"(_proj|lm_head)$")  # names of the linear modules of the supported families

# Tensors beside a weight that do not change it: activations and the KV cache are not quantized by selfspec.
_UNUSED = re.compile(r"bias|(input|output|[qkv])_(scale|zero_point|global_scale)")


@dataclass(frozen=True)
class Scheme:
    """The layout of a weight's tensors."""

    layout: str  # pack-quantized, int-quantized, float-quantized, fp8, gptq, gptq_v2 or awq
    bits: int
    shared: tuple[int, int]  # rows and columns of the weight that share a scale; 0: all of them
    symmetric: bool = True

    def group(self, k: int) -> int:
        """Returns the columns that share a scale, for a weight with k columns."""
        return self.shared[1] or k


@dataclass(frozen=True)
class Format:
    """The quantization_config of a checkpoint."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets and their scheme; "Linear": all linear modules
    ignored: tuple[str, ...] = ()  # like targets

    def scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module ("model.layers.0.mlp.up_proj"); None if its weight is not quantized.

        A target or ignored entry is a module's name, "re:" and an expression that matches its beginning, or "Linear".
        Names come before expressions, expressions before "Linear".
        """
        if not _LINEAR.search(module) or any(_match(module, entry) is not None for entry in self.ignored):
            return None
        found = [
            (rank, index)
            for index, (targets, _) in enumerate(self.schemes)
            for target in targets
            if (rank := _match(module, target)) is not None
        ]
        return self.schemes[min(found)[1]][1] if found else None


def _match(module: str, target: str) -> int | None:
    """Returns 0 if a target is the module's name, 1 if its expression matches, 2 if it is "Linear", otherwise None."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return {module: 0, "Linear": 2}.get(target)


@dataclass(frozen=True)
class Expected:
    """A tensor that a layout needs."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


def check_tensors(module: str, expected: Mapping[str, Expected], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless a module's tensors, by the last part of their names, are those that its layout needs.

    Reads no values: tensors may be on the meta device.
    """
    again = "Use the config.json and weights of one and the same checkpoint."
    for suffix, wanted in expected.items():
        found = tensors.get(suffix)
        if found is None and not wanted.optional:
            have = ", ".join(sorted(tensors)) or "nothing"
            raise ValueError(f"{module} has no tensor {suffix} but {have}. {again}")
        if found is not None and (tuple(found.shape) != wanted.shape or found.dtype not in wanted.dtypes):
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted.dtypes)
            raise ValueError(
                f"{module}.{suffix} is {list(found.shape)} {str(found.dtype).removeprefix('torch.')} instead of "
                f"{list(wanted.shape)} {dtypes}: it is packed in another way than quantization_config says. {again}"
            )
    for suffix in tensors:
        if suffix not in expected and not _UNUSED.fullmatch(suffix):
            raise ValueError(
                f"{module}.{suffix} is a tensor that the layout in quantization_config does not have, so the weight "
                f"would be read wrongly. {again}"
            )
