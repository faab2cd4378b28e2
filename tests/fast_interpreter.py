"""Makes Triton's interpreter faster without changing results, and the order of its sums independent of the number of
rows. Each patch of names that another version of Triton lacks is left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def patch_interpreter() -> None:
    """Applies all patches to Triton's interpreter in this process."""
    from triton.language import core
    from triton.runtime import interpreter

    pass_semantic_directly(interpreter)
    patch_language_once()
    sum_dots_in_order()
    cache_types()
    compare_names(core, interpreter)


def pass_semantic_directly(interpreter: Any) -> None:
    """Makes patched functions of the language call what is below the check of `@builtin`, which asks for the argument
    that the patch passes, and copy no keyword arguments."""
    if not _has((interpreter, name) for name in ("_patch_attr", "_LangPatchScope", "interpreter_semantic")):
        return
    passed = interpreter.interpreter_semantic

    def patch_attr(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = passed
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def patch_language_once() -> None:
    """Makes Triton's interpreter patch its language once instead of at every call of a kernel's functions, which takes
    about half of its time; and switches off its overflow checks (a third of the rest), which report nothing unless the
    option `debug` is set."""
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
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
    made = core.block_type(core.float32, [4, 2]), core.tensor(None, core.int32)
    expected = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    if _has(names) and tuple(set(vars(value)) for value in made) == expected:
        _share_shapes(core)
        _cache_conversions(core, semantic.TritonSemantic, interpreter)
        _cache_constants(core, semantic.TritonSemantic)


def _has(names: Iterable[tuple[Any, str]]) -> bool:
    return all(hasattr(owner, name) for owner, name in names)


def _share_shapes(core: Any) -> None:
    """Replaces the constructors of block types and tensors: those of one shape share shape and number of elements."""
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    of_shared: dict[int, tuple[Any, Any, str, dict[str, str]]] = {}  # by the id of a shared shape, which is never freed
    of_shared_tensor: dict[int, tuple[Any, Any]] = {}

    @cache
    def of_block(shape: tuple[int, ...]) -> tuple[Any, Any, str, dict[str, str]]:
        made = core.block_type.__new__(core.block_type)
        block_init(made, core.int1, list(shape))
        parts = of_shared[id(made.shape)] = made.shape, made.numel, str(made.shape), {}
        return parts

    @cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        made = core.tensor.__new__(core.tensor)
        tensor_init(made, None, core.block_type(core.int1, list(shape)) if shape else core.int1)
        return made.shape, made.numel

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        parts = of_shared.get(id(shape)) or of_block(tuple(getattr(size, "value", size) for size in shape))
        self.shape, self.numel, text, names = parts
        self.element_ty, name = element_ty, element_ty.name
        if name not in names:
            names[name] = f"<{text}, {element_ty}>"
        self.name = names[name]

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = of_tensor(())
            return
        parts = of_shared_tensor.get(id(type.shape))
        if parts is None:
            parts = of_tensor(tuple(type.shape))
            if id(type.shape) in of_shared:
                of_shared_tensor[id(type.shape)] = parts
        self.shape, self.numel = parts

    core.block_type.__init__, core.tensor.__init__ = new_block_type, new_tensor


def _cache_conversions(core: Any, of_two: Any, interpreter: Any) -> None:
    """Skips broadcasts of equal shapes and unwrapping of plain values, and caches numpy dtypes, common types and common
    shapes."""
    unwrap, np_dtype = core._unwrap_if_constexpr, interpreter._get_np_dtype
    broadcast, common_type = of_two.broadcast_impl_value, of_two.computation_type_impl
    plain = {core.tensor, int, bool, float, str, type(None)}
    np_dtypes: dict[str, Any] = {}
    common_shapes: dict[tuple[int, int], Any] = {}
    common_types: dict[tuple, Any] = {}

    def broadcast_unlike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:
            return left, right
        key = id(left.shape), id(right.shape)  # shapes are shared and kept
        if key in common_shapes:
            shape = common_shapes[key]
            return expand(self, left, shape), expand(self, right, shape)
        pair = broadcast(self, left, right)
        if left.type.is_block() and right.type.is_block() and len(left.shape) == len(right.shape):
            common_shapes[key] = pair[0].type.shape
        return pair

    def expand(self: Any, value: Any, shape: Any) -> Any:
        """A block of as many axes, broadcast to a shape."""
        if value.type.shape is shape:
            return value
        return core.tensor(
            self.builder.create_broadcast(value.handle, tuple(shape)), core.block_type(value.dtype, shape)
        )

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


def _cache_constants(core: Any, of_two: Any) -> None:
    """Makes two operands of one type and shape skip all conversions, and makes a number that meets a tensor become the
    tensor that it became when it last met one of that type and shape. The data of these tensors is read-only."""
    names = "binary_op_type_checking_impl", "to_tensor", "scalar_constant"
    if not _has((of_two, name) for name in names):
        return
    converted, to_tensor, constant = (getattr(of_two, name) for name in names)
    tensor = core.tensor
    closed = {"int1", "fp32", "fp64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
    constants: dict[tuple, Any] = {}
    operands: dict[tuple, Any] = {}

    def operand(self: Any, own: Any, number: Any, is_left: bool, options: tuple) -> tuple[Any, Any]:
        """The operands, converted: the tensor itself, and the number as a tensor."""
        key = type(number), number, is_left, own.dtype.name, id(own.shape), options  # shapes are shared and kept
        if key in operands:
            return own, operands[key]
        pair = converted(self, *((number, own) if is_left else (own, number)), *options)
        own_converted, other = reversed(pair) if is_left else pair
        if own_converted is own:
            other.handle.data.flags.writeable = False
            operands[key] = other
        return own_converted, other

    def convert_unlike(self: Any, left: Any, right: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        if type(left) is tensor:
            if type(right) is tensor:
                if left.shape is right.shape and left.dtype.name == right.dtype.name and left.dtype.name in closed:
                    return left, right
            elif not named and _is_key(right):
                return operand(self, left, right, False, options)
        elif not named and type(right) is tensor and _is_key(left):
            own, other = operand(self, right, left, True, options)
            return other, own
        return converted(self, left, right, *options, **named)

    def to_tensor_if_needed(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tensor else to_tensor(self, value, check_type)

    def cached_constant(self: Any, value: Any, dtype: Any) -> Any:
        if not _is_key(value):
            return constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = constant(self, value, dtype)
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    of_two.binary_op_type_checking_impl, of_two.to_tensor = convert_unlike, to_tensor_if_needed
    of_two.scalar_constant = cached_constant


def _is_key(value: Any) -> bool:
    """Whether a value is a number that identifies its constant: 0.0 and -0.0 are one key of a dict, and a NaN is
    none."""
    return type(value) is int or (type(value) is float and value != 0 and value == value)


def compare_names(core: Any, interpreter: Any) -> None:
    """Makes questions about a type's kind and size lookups by its name instead of scans of lists."""
    dtype = core.dtype
    if not _has([(dtype, "SINT_TYPES"), (dtype, "UINT_TYPES"), (dtype, "FP_TYPES")]):
        return
    ints, floats = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES), frozenset(dtype.FP_TYPES)
    is_equal = dtype.__eq__
    dtype.is_int, dtype.is_floating = lambda self: self.name in ints, lambda self: self.name in floats
    dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    if hasattr(interpreter, "_validate_np_data_size"):
        fits = interpreter._validate_np_data_size
        sizes = {name: max(dtype(name).primitive_bitwidth // 8, 1) for name in ints | floats}  # bytes

        def fits_by_name(array: Any, of_elements: Any) -> bool:
            size = sizes.get(of_elements.name)
            return fits(array, of_elements) if size is None else array.itemsize <= size

        interpreter._validate_np_data_size = fits_by_name
