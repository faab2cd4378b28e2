"""Without a GPU, Triton kernels run in Triton's interpreter, which must be set before Triton is imported. Two patches
make it faster without changing results; one makes the order of its sums independent of the number of rows."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def patch_language_once() -> None:
    """Makes Triton's interpreter patch its language once instead of at every call of a kernel's functions, which takes
    about half of its time; and switches off its overflow checks (a third of the rest), which report nothing unless the
    option `debug` is set."""
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # other versions of Triton may lack it
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def sum_dots_in_order() -> None:
    """Makes each float32 element of a dot the sum of its products in the order of K. The interpreter multiplies with a
    BLAS, which on some CPUs sums in another order when the number of rows or columns changes."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def create_ordered_dot(self: Any, a: Any, b: Any, sums: Any, *others: Any) -> Any:
        if sums.data.dtype != np.float32 or a.data.dtype not in (np.float16, np.float32):
            return create_dot(self, a, b, sums, *others)
        products = a.data.astype(np.float32)[..., None] * b.data.astype(np.float32)[..., None, :, :]  # [..., M, K, N]
        return interpreter.TensorHandle(products.sum(axis=-2) + sums.data, sums.dtype.scalar)

    builder.create_dot = create_ordered_dot


def cache_types() -> None:
    """Makes Triton's interpreter reuse its type objects instead of making several for each value of a kernel; types of
    one shape share their shape object, so that two of them compare by identity."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    names = (core, "_unwrap_if_constexpr"), (interpreter, "_get_np_dtype")
    names += (semantic.TritonSemantic, "broadcast_impl_value"), (semantic.TritonSemantic, "computation_type_impl")
    if not all(hasattr(owner, name) for owner, name in names):  # other versions of Triton may lack them
        return
    made = core.block_type(core.float32, [4, 2]), core.tensor(None, core.int32)
    expected = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    if tuple(set(vars(value)) for value in made) == expected:
        _share_shapes(core)
        _cache_conversions(core, semantic.TritonSemantic, interpreter)


def _share_shapes(core: Any) -> None:
    """Replaces the constructors of block types and tensors: those of one shape share shape and number of elements."""
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__

    @cache
    def of_block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        made = core.block_type.__new__(core.block_type)
        block_init(made, core.int1, list(shape))
        return made.shape, made.numel, str(made.shape)

    @cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        made = core.tensor.__new__(core.tensor)
        tensor_init(made, None, core.block_type(core.int1, list(shape)) if shape else core.int1)
        return made.shape, made.numel

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.shape, self.numel, text = of_block(tuple(getattr(size, "value", size) for size in shape))
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = new_block_type, new_tensor


def _cache_conversions(core: Any, of_two: Any, interpreter: Any) -> None:
    """Skips broadcasts of equal shapes and unwrapping of plain values, and caches numpy dtypes and common types."""
    unwrap, np_dtype = core._unwrap_if_constexpr, interpreter._get_np_dtype
    broadcast, common_type = of_two.broadcast_impl_value, of_two.computation_type_impl
    plain = {core.tensor, int, bool, float, str, type(None)}
    np_dtypes: dict[str, Any] = {}
    common_types: dict[tuple, Any] = {}

    def broadcast_unlike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    def cached_np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    def cached_common_type(self: Any, left: Any, left_is_scalar: bool, right: Any, *others: bool) -> Any:
        key = left.name, left_is_scalar, right.name, *others
        if key not in common_types:
            common_types[key] = common_type(self, left, left_is_scalar, right, *others)
        return common_types[key]

    def unwrap_if_needed(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap_if_needed, cached_np_dtype
    of_two.broadcast_impl_value, of_two.computation_type_impl = broadcast_unlike, cached_common_type


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton") is not None:
        patch_language_once()
        sum_dots_in_order()
        cache_types()
