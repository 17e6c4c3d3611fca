"""Triton's interpreter with what it lacks to judge kernels of training: bfloat16, TF32, scalars and libdevice.

The interpreter of Triton 3.7 holds bfloat16 as uint16, and adds, multiplies and sums those bits as integers. It rounds to
bfloat16 by cutting off. Float arguments and the counters of loops stay Python's numbers, which have no `.to`. So what it
computes of such a kernel says nothing about the kernel. Here each operation on bfloat16 is computed in fp32 and rounded to
nearest even, as the hardware's is, and what that does not cover raises. A product of fp32 matrices that asks for TF32, which is
Triton's default, has factors rounded to its 10 bits of mantissa.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ROUNDED = [
    "fadd",
    "fsub",
    "fmul",
    "fdiv",
    "frem",
    "precise_divf",
    "minimumf",
    "maximumf",
    "minnumf",
    "maxnumf",
    "fma",
    "clampf",
]
ROUNDED += ["exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "precise_sqrt", "rsqrt", "floor", "ceil", "erf"]
COMPARED = [f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "GT", "LE", "GE", "EQ", "NE")]
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda values: 1 / np.sqrt(values),
    "tanh": np.tanh,
}  # what Liger's kernels take of it


def nearest(values: np.ndarray, kept: int) -> np.ndarray:
    """fp32 values rounded to `kept` of their 23 bits of mantissa, to nearest even; NaN and infinity stay."""
    bits, cut = values.astype(np.float32).view(np.uint32), 23 - kept
    half = np.uint32((1 << (cut - 1)) - 1)
    rounded = (bits + half + ((bits >> np.uint32(cut)) & np.uint32(1))) & np.uint32(0xFFFFFFFF << cut & 0xFFFFFFFF)
    return np.where(np.isfinite(values), rounded, bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The bits, as uint16, of fp32 values rounded to bfloat16."""
    return (nearest(values, 7).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def correct() -> None:
    """Correct the interpreter of this process. Call it with TRITON_INTERPRET=1 and before kernels are imported."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    half = tl.bfloat16

    def is_half(handle: Any) -> bool:
        return isinstance(handle, TensorHandle) and handle.dtype.scalar == half

    def widened(handle: Any) -> Any:
        return TensorHandle(from_bf16(handle.data), tl.float32) if is_half(handle) else handle

    def computed(name: str, rounds: bool) -> None:
        plain: Callable[..., Any] = getattr(InterpreterBuilder, f"create_{name}")

        def operation(self: Any, *operands: Any) -> Any:
            if not any(map(is_half, operands)):
                return plain(self, *operands)
            result = plain(self, *map(widened, operands))
            return TensorHandle(to_bf16(result.data), half) if rounds else result

        setattr(InterpreterBuilder, f"create_{name}", operation)

    for name in ROUNDED:
        computed(name, rounds=True)
    for name in COMPARED:
        computed(name, rounds=False)

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def cast(self: Any, source: Any, wanted: Any, rounding: Any = None) -> Any:
        if not is_half(source) and wanted.scalar != half:
            return plain_cast(self, source, wanted)
        if wanted.scalar != half:
            return plain_cast(self, widened(source), wanted)
        return source if is_half(source) else TensorHandle(to_bf16(source.data.astype(np.float32)), half)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if a.dtype.scalar == tl.float32 and precision == tf32:
            a, b = (TensorHandle(nearest(factor.data, 10), tl.float32) for factor in (a, b))
        return plain_dot(self, widened(a), widened(b), d, precision, imprecise)

    def refused(what: str, plain: Callable[..., Any], handles: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*operands: Any, **named: Any) -> Any:
            if any(map(is_half, handles(*operands))):
                raise NotImplementedError(f"{what} of bfloat16 is not computed here")
            return plain(*operands, **named)

        return operation

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot = cast, cast, dot
    plain_atomic = InterpreterBuilder.create_atomic_rmw

    def atomic(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Programs run one after the other here: a sum of two bfloat16, rounded, for each of them."""
        if not is_half(value):
            return plain_atomic(self, kind, pointer, value, mask, sem, scope)
        places = pointer.data[mask.data]
        if kind != interpreter._ir.ATOMIC_OP.FADD or len(np.unique(places)) < places.size:
            raise NotImplementedError(
                "an atomic of bfloat16 other than a sum into places that differ is not computed here"
            )
        before = self.create_masked_load(pointer, mask, None, None, None, False)
        self.create_masked_store(pointer, self.create_fadd(before, value), mask, None, None)
        return before

    InterpreterBuilder.create_atomic_rmw = atomic
    plain_sum, plain_reduce = interpreter.ReduceOps.sum, interpreter.ReduceOps.apply_impl

    def summed(self: Any, given: Any) -> Any:
        """By halves, each sum rounded: a GPU's threads add some of their own one after the other first, which rounds no less."""
        if not is_half(given.handle):
            return plain_sum(self, given)
        axis = 0 if self.axis is None else self.axis
        values = from_bf16(given.handle.data.reshape(-1) if self.axis is None else given.handle.data)
        while values.shape[axis] > 1:
            values = nearest(np.add(*np.split(values, 2, axis)), 7)
        return self.to_tensor(to_bf16(values if self.keep_dims else values.squeeze(axis)), half)

    def reduced(self: Any, given: Any) -> Any:
        if any(is_half(one.handle) for one in given) and self.combine_fn != tl.standard._sum_combine:
            raise NotImplementedError("a reduction of bfloat16 other than its sum is not computed here")
        return plain_reduce(self, given)

    interpreter.ReduceOps.sum, interpreter.ReduceOps.apply_impl = summed, reduced
    interpreter.ScanOps.apply_impl = refused(
        "a scan", interpreter.ScanOps.apply_impl, lambda _, given: [one.handle for one in given]
    )

    plain_argument = interpreter._implicit_cvt

    def argument(value: Any) -> Any:
        if type(value) is float:
            return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return plain_argument(value)

    interpreter._implicit_cvt = argument

    def counted(*bounds: Any) -> Iterator[Any]:
        return map(plain_argument, range(*bounds))

    def loop(self: ast.NodeTransformer, node: ast.For) -> ast.AST:
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            node.iter.func.id = "counted"
        return self.generic_visit(node)

    interpreter.counted = counted  # a kernel's rewritten function sees the names of that module
    interpreter.ASTTransformer.visit_For = loop
    libdevice = importlib.import_module("triton.language.extra.libdevice")
    for name, formula in LIBDEVICE.items():

        def function(value: Any, formula: Callable[..., Any] = formula) -> Any:
            return tl.tensor(interpreter_builder.unary_op(value.handle, formula), value.type)

        setattr(libdevice, name, function)
    np.seterr(all="ignore")
