"""Programmatic dependent launch (sm_90 and newer): a kernel may start before the kernels that it depends on have ended.

`wait` blocks until all earlier launches have ended and their writes are visible. `release` allows the next launch to
start once every program of this one has called it. Before `wait` a kernel may read only what no kernel of the current
pass writes: weights, the tree, and lengths and pages, which change only at the end of a step. The first launch of a
pass (`embed_rope` with BEGINS) waits before it releases, so that this holds for all later ones; so does that of each
depth of a beam, after the launch that adds nodes to the trees.

Where to call `release`: early, if the next kernel has much to read before it waits, or if the programs of both kernels
fit on the GPU side by side and the next one can prefetch its weights. Otherwise late: programs that start beside
running ones crowd onto the few SMs with free resources.
"""

from __future__ import annotations

from selfspec.kernels.triton_compat import jit, tl


@jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def release(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch_weight(weight, weight_rows, BN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Prefetches the first COLUMNS columns of BN weight rows, given by their offsets, into L2, while the kernel would
    only wait."""
    if PDL and COLUMNS > 0:
        PARTS: tl.constexpr = 128 // BN if BN < 128 else 1  # one request for each of 128 threads
        WIDTH: tl.constexpr = COLUMNS // PARTS
        first = weight + weight_rows[:, None] + (tl.arange(0, PARTS) * WIDTH)[None, :]
        size = tl.full(first.shape, WIDTH * (weight.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [first.to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
