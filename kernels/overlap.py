"""Launches that overlap (programmatic dependent launch, from sm_90 on): a kernel may start before those it depends on
have ended, and waits for them itself.

Before `wait` a kernel may read what no kernel of its graph writes: weights, and what a plan fixes. The kernel after it
may start once all programs have called `release`. Where that one has much to look up before it waits, early is best.
Otherwise late: programs that start next to others still at work crowd onto the SMs that have room left.
"""

from __future__ import annotations

from selfspec.kernels.triton_or_none import jit, tl


@jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def release(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
