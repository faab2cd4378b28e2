"""Launches that overlap (programmatic dependent launch, from sm_90 on): a kernel may start before those it depends on
have ended, and waits for them itself.

Before `wait` a kernel may read weights, what a plan fixes, and what is written only where a cycle ends (lengths,
pages): the root's `enter`, where a cycle begins, waits before it releases anybody. The kernel after one may start once
all its programs have called `release`. Where that kernel has much to look up before it waits, or all programs of both
have room side by side and it can ask for its weights meanwhile, early is best. Otherwise late: programs that start next
to others still at work crowd onto the SMs that have room left.
"""

from __future__ import annotations

from selfspec.kernels.triton_compat import jit, tl


@jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def fetch(weight, weight_rows, BN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Asks for the first columns of BN weight rows, given by their offsets: near when the wait is over, and read from
    memory while there was nothing else to do."""
    if PDL and COLUMNS > 0:
        PARTS: tl.constexpr = 128 // BN if BN < 128 else 1  # one request for each of 128 threads
        WIDTH: tl.constexpr = COLUMNS // PARTS
        first = weight + weight_rows[:, None] + (tl.arange(0, PARTS) * WIDTH)[None, :]
        size = tl.full(first.shape, WIDTH * (weight.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [first.to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def release(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
