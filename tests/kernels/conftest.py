"""Triton's interpreter does work again for every call of one function by another, every element type, shape and result, that once is enough for: a quarter of the time, and of the rest a sixth."""
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import math

    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    standard = []

    def call_within(self, *args, **kwargs):
        """As `InterpretedFunction.__call__`, which patches `triton.language` once more for it: the kernel's start has; or what Triton's own functions see of it, which stays so."""
        if not standard and any(x is tl.core for x in self.fn.__globals__.values()):
            standard.append(interpreter._patch_lang(self.fn))
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_within

    found, look_up = {}, interpreter._get_np_dtype

    def np_dtype(dtype):
        """As `_get_np_dtype`, which makes its table for every look-up; of scalar types by name."""
        if dtype.is_block() or dtype.is_ptr():
            return look_up(dtype)
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = np_dtype

    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def checked(self, lhs, rhs, binary_op):
        """As `binary_op_sanitize_overflow_impl`, which works it out by ten operations of the interpreted language."""
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            result = exact[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            assert kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value(), f"int{kind.int_bitwidth} overflow of {binary_op.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = checked

    shapes, of_shape = {}, tl.block_type.__init__

    def block_type(self, element_ty, shape):
        """As `block_type.__init__`, which makes a value of the interpreted language of every extent, for every result; of a shape that was there before it takes that."""
        known = shapes.get(key := tuple(int(getattr(s, "value", s)) for s in shape))
        if known is None:
            of_shape(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
        else:
            self.shape, self.numel, text = known
            self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    tl.block_type.__init__ = block_type

    extents = {}

    def tensor(self, handle, type):
        """As `tensor.__init__`, likewise."""
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in extents:
            shape = [tl.constexpr(s) for s in key]
            extents[key] = tl.constexpr(math.prod(key)), tl.core.tuple(shape)
        self.numel, self.shape = extents[key]

    tl.tensor.__init__ = tensor
