"""Launches that overlap (programmatic dependent launch, from sm_90 on): a kernel may start before those it depends on
have ended, and waits for them itself.

Before `wait` a kernel may read weights, what a plan fixes, and what is written only where a cycle ends (lengths,
pages): the root's `enter`, where a cycle begins, waits before it releases anybody. The kernel after one may start once
all its programs have called `release`. Where that kernel has much to look up before it waits, early is best. Otherwise
late: programs that start next to others still at work crowd onto the SMs that have room left.
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
