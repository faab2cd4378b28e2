"""QuantizedWeight: a weight of 4 or 8 bits in the layout that the matmuls, the LM head and the embedding read.

A weight [N, K] of small numbers q has a scale for each group of `group` columns of a row:

    w = scale * (q - zero) - minimum

Columns are stored in units of 64. With 4 bits, a byte of a unit holds a column of its first half in the low and one of
its second half in the high 4 bits. Of each 4 bytes the second and third change places: then one AND takes two
neighbouring columns out of a word, as the two halves of a register that the tensor cores read. The bytes of 16 rows of
a unit are neighbours (8 bits: of each half of it), so that a warp reads whole cache lines. The scales of a step of 128
columns of a row and then its minimums are neighbours, so are its zeros, and so are those of the rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F

HALF = 32  # columns of half a unit
STEP = 128  # columns that a warp multiplies with one load of scales
TILE_ROWS = 16  # rows whose bytes of a unit are neighbours
SUPER_COLUMNS = 256  # columns that share a super_scale or super_minimum
_SCALES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
_KINDS = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class QuantizedWeight:
    """Made by `pack`. Where `super_scale` is given, `scale` is int8 or uint8, and a group's scale is scale *
    super_scale; its minimum likewise, with the last index 1 of super_scale. Groups of padded columns have scale 0."""

    packed: torch.Tensor  # [N / 16, units, 1 (4 bits) or 2 halves, 16 rows, 32]: uint8 (4 bits), int8 or float8_e4m3fn
    scale: torch.Tensor  # [steps, N, scales of a step, then minimums]; groups larger than a step: [groups, N, 1 or 2]
    columns: int  # K
    group: int  # columns that share a scale: 16, 32, 64, a multiple of 128, or K: one scale per row
    has_minimum: bool = False
    zero: torch.Tensor | int = 0  # one for all weights, with 8 bits 0; else [steps, N, zeros], uint8 (4 bits) or int8
    super_scale: torch.Tensor | None = None  # [K / 256, N, 1 or, with minimums, 2] float16

    @classmethod
    def pack(
        cls,
        q: torch.Tensor,  # [N, K]: uint8 of 0..15 (4 bits), int8 or float8_e4m3fn (8 bits)
        scale: torch.Tensor,  # [N, K / group]
        group: int,
        *,
        bits: int,
        zero: torch.Tensor | int = 0,  # one for all weights, or [N, K / group] of q's dtype
        super_scale: torch.Tensor | None = None,  # [N, K / 256] float16
        minimum: torch.Tensor | None = None,  # [N, K / group]
        super_minimum: torch.Tensor | None = None,  # [N, K / 256] float16, where super_scale is given
    ) -> QuantizedWeight:
        """Packs plain tensors; weights that one launch multiplies with are concatenated before."""
        n, k = q.shape
        _check(q, bits, scale, group, zero)
        if minimum is not None and (super_scale is None) != (super_minimum is None):
            raise ValueError("scales and minimums must both have super values or both have none; multiply them out")
        padding = -k % (2 * HALF)
        # A step has equal groups: one of 48 columns becomes three of 16.
        equal = group if group == k or group % STEP == 0 else gcd(group, STEP)
        parts = max(1, STEP // equal) if equal != k else 1

        def by_group(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.repeat_interleave(group // equal, 1) if group != equal else tensor
            return F.pad(tensor, (0, -tensor.shape[1] % parts)).unflatten(1, (-1, parts)).transpose(0, 1).contiguous()

        if isinstance(zero, int) and zero and bits == 8:
            zero = torch.full((n, k // group), zero, dtype=torch.int8, device=q.device)
        scales, supers = [scale], [super_scale]
        if minimum is not None:
            scales, supers = [scale, minimum], [super_scale, super_minimum]
        dtype = common_dtype(scales)
        # Padded as bytes: float8 has no `pad`.
        halves = F.pad(q.view(torch.uint8), (0, padding)).unflatten(1, (-1, 2, HALF))
        row_bytes = halves[:, :, :1] | halves[:, :, 1:] << 4 if bits == 4 else halves
        return cls(
            _tiled(_exchanged(row_bytes)).view(q.dtype),
            torch.cat([by_group(values.to(dtype)) for values in scales], 2),
            k,
            equal,
            minimum is not None,
            by_group(zero).clone() if isinstance(zero, torch.Tensor) else zero,
            None if super_scale is None else torch.stack([above.T for above in supers if above is not None], 2),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[1], self.columns

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def kind(self) -> str:
        """int4, int8 or fp8."""
        return _KINDS[self.packed.dtype]

    @property
    def is_by_row(self) -> bool:
        """One scale per row."""
        return self.group == self.columns

    @property
    def parts(self) -> int:
        """Scales of a step."""
        return self.scale.shape[2] // (2 if self.has_minimum else 1)

    @property
    def has_many_scales(self) -> bool:
        """Whether scales take so many registers that a warp has few left for rows of x that are loaded ahead."""
        return self.parts > 2 or self.has_minimum

    @property
    def subtracts_zeros(self) -> bool:
        """Whether 8-bit zeros are subtracted before scaling. In the offset, zero * scale or 128 * scale + minimum would
        be rounded to bfloat16 and lose accuracy; 128 * scale alone is exact."""
        return self.kind == "int8" and (isinstance(self.zero, torch.Tensor) or self.has_minimum)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> QuantizedWeight:
        return self._map(lambda _, tensor: tensor.to(device))

    def rows(self, index: torch.Tensor | slice) -> QuantizedWeight:
        """The rows that an index along N, or a slice of step 1, selects, in its order. Copies no whole tiles."""
        tiles = self._whole_tiles(index)
        packed = _tiled(self.row_bytes(index)).view(self.packed.dtype) if tiles is None else self.packed[tiles]
        # Copied: kernels assume contiguous [steps, N, values], and read some of them as aligned words.
        return self._map(
            lambda name, tensor: (
                packed if name == "packed" else tensor[:, index].clone(memory_format=torch.contiguous_format)
            )
        )

    def row_bytes(self, index: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The stored bytes of rows, as they are stored, row by row: uint8 [rows, units, halves, 32]."""
        packed, tiles = self.packed.view(torch.uint8), self._whole_tiles(index)
        if tiles is not None and isinstance(index, slice):
            start, stop, _ = index.indices(self.shape[0])
            return packed[tiles].permute(0, 3, 1, 2, 4).flatten(0, 1)[: stop - start]
        at = torch.arange(self.shape[0], device=self.device)[index]
        return packed[at // TILE_ROWS, :, :, at % TILE_ROWS]

    def _whole_tiles(self, index: torch.Tensor | slice) -> slice | None:
        """The tiles that a range of rows consists of; None where it is no range, or divides tiles."""
        if not isinstance(index, slice):
            return None
        start, stop, _ = index.indices(self.shape[0])
        is_whole = start % TILE_ROWS == 0 and (stop % TILE_ROWS == 0 or stop == self.shape[0])
        return slice(start // TILE_ROWS, -(-stop // TILE_ROWS)) if is_whole else None

    def write_rows(self, packed: torch.Tensor, start: int) -> None:
        """Copies the rows into the tiles `packed` of a larger weight, from row `start` on."""
        at = torch.arange(start, start + self.shape[0], device=self.device)
        packed.view(torch.uint8)[at // TILE_ROWS, :, :, at % TILE_ROWS] = self.row_bytes()

    def dequantize(self) -> torch.Tensor:
        """The weight in float32: [N, K]."""
        weight = (self._numbers() - self._zeros()) * self._group_values(0)
        return (weight - self._group_values(1) if self.has_minimum else weight).flatten(1)

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as matmuls of the kernels use it, in `dtype`: [N, K]. Scale and offset are rounded to `dtype`, and
        then the weight. The offset is the minimum and, with 4 bits, zero * scale. (With float16 the kernels multiply
        fp8 scales by 2 ** 8 before rounding: scales below 2 ** -14 keep up to 8 bits more than here.)"""
        q, scale, offset = self._numbers(), self._group_values(0), torch.tensor(0.0)
        if self.bits == 4:
            offset = self._zeros() * scale
        else:
            q = q - self._zeros()
        if self.has_minimum:
            offset = offset + self._group_values(1)
        return (q * scale.to(dtype).double() - offset.to(dtype).double()).to(dtype).flatten(1)

    def _numbers(self) -> torch.Tensor:
        """The stored numbers by group, in float32: [N, groups, columns of a group]."""
        q = _exchanged(self.row_bytes())
        q = torch.cat((q & 15, q >> 4), 2).flatten(1) if self.bits == 4 else q.flatten(1).view(self.packed.dtype)
        return q[:, : self.columns].float().unflatten(1, (-1, self.group))

    def _group_values(self, index: int) -> torch.Tensor:
        """The scale (index 0) or minimum (1) of each group in float32, exactly: [N, groups, 1]."""
        values = self._by_row(self.scale[..., index * self.parts : (index + 1) * self.parts])
        if self.super_scale is None:
            return values
        above = self.super_scale[..., index].T.float()
        return values * above.repeat_interleave(values.shape[1] // above.shape[1], 1)[..., None]

    def _zeros(self) -> torch.Tensor:
        """The zero of each group in float32, [N, groups, 1]; or one zero for all, []."""
        return self._by_row(self.zero) if isinstance(self.zero, torch.Tensor) else torch.tensor(float(self.zero))

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Values of groups [steps, N, parts] in float32, row by row: [N, groups, 1]."""
        return values.transpose(0, 1).flatten(1)[:, : self.columns // self.group].float()[..., None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field; fields that are None or an integer are left out."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def _map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


def _tiled(row_bytes: torch.Tensor) -> torch.Tensor:
    """[N, units, halves, 32] to [N / 16, units, halves, 16, 32]; rows that fill the last tile are 0."""
    padded = F.pad(row_bytes, (0, 0, 0, 0, 0, 0, 0, -len(row_bytes) % TILE_ROWS))
    return padded.unflatten(0, (-1, TILE_ROWS)).permute(0, 2, 3, 1, 4).contiguous()


def _exchanged(row_bytes: torch.Tensor) -> torch.Tensor:
    """The second and third of each 4 bytes exchanged."""
    return row_bytes.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3)


def common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that holds the values of all tensors; int8 for int8 and uint8, whose values are at most 63 here."""
    dtypes = {tensor.dtype for tensor in tensors}
    return torch.int8 if dtypes == {torch.uint8, torch.int8} else reduce(torch.promote_types, dtypes)


def _check(q: torch.Tensor, bits: int, scale: torch.Tensor, group: int, zero: torch.Tensor | int) -> None:
    n, k = q.shape
    if q.dtype not in _KINDS or (q.dtype == torch.uint8) != (bits == 4) or bits not in (4, 8):
        raise ValueError(f"q is {q.dtype}, which is no weight of {bits} bits: use uint8 for 4, int8 or float8 for 8")
    if k % 16 or k % group or (group % 16 and group != k):
        raise ValueError(
            f"{k} columns in groups of {group} cannot be packed: both must be multiples of 16; regroup the weight"
        )
    if scale.shape != (n, k // group):
        raise ValueError(f"scale must be {[n, k // group]}, got {list(scale.shape)}")
    if scale.dtype not in _SCALES:
        raise ValueError(f"scales are {scale.dtype}; use one of {', '.join(map(str, _SCALES))}")
    if isinstance(zero, torch.Tensor) and zero.dtype != q.dtype:
        raise ValueError(f"zeros are {zero.dtype}, q is {q.dtype}")
    if q.dtype == torch.float8_e4m3fn and (isinstance(zero, torch.Tensor) or zero):
        raise ValueError("float8 weights have no zero points; dequantize the weight to 16 bit")
    if isinstance(zero, int) and not (0 <= zero < 16 if bits == 4 else -128 <= zero < 128):
        raise ValueError(f"a zero of {zero} is not possible with {bits} bits")
