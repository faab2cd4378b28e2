"""Where there is no GPU, Triton kernels run in its interpreter; that has to be said before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace

import torch


def interpret_without_delay() -> None:
    """Triton's interpreter replaces its language, and puts it back, at every call of every function of a kernel, which
    takes about half of its time; replaced once and for all, it does the same. A third of what is left goes into finding
    out whether sums and products overflow, of which nobody hears unless its option `debug` is set."""
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # other versions may do it in another way
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton") is not None:
        interpret_without_delay()
