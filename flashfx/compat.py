"""Everything that differs between releases of PyTorch and Triton, and what is wrong in some of them."""
from __future__ import annotations

import contextlib
import functools
import os
import sys


def interpreting() -> bool:
    """Is Triton's interpreter switched on? Read without importing Triton, as Triton reads it at import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def repair_interpreter() -> None:
    """Make Triton's interpreter (3.6, 3.7) compute bfloat16 as a GPU does, and take float32 products that the GPU divides into it.

    There bfloat16 is held as uint16: `tl.dot` multiplies the bit patterns as integers, and float32 -> bfloat16 truncates
    instead of rounding to nearest even. With both repaired, the text that tests run is the text that GPUs run.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    original_cast = InterpreterBuilder.cast_impl

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float32)
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(src.data, dtype=np.float32).view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            quiet = ((bits >> 16) | 0x40).astype(np.uint16)
            return TensorHandle(np.where(np.isnan(src.data), quiet, rounded), target)
        return original_cast(self, src, dst_type)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return TensorHandle(np.matmul(widen(a), widen(b), dtype=np.float32) + d.data, d.dtype.scalar)

    known = interpreter_builder.options.allowed_dot_input_precisions
    object.__setattr__(interpreter_builder.options, "allowed_dot_input_precisions", (*known, "bf16x3", "bf16x6"))
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


@functools.cache
def keep_transformers_whole() -> None:
    """Trace `nn.TransformerEncoder` and `nn.TransformerDecoder` in one graph when they are given a mask.

    Both compare the mask with a causal one to pass `is_causal` on, a hint that changes no result. Under Dynamo that reads data: the graph ends
    inside of PyTorch's own module, and what follows it there is not compiled. Traced, an undecided hint is False, unless the mask wants a gradient,
    which it has only where it is read. Holds for every backend of this process from then on.
    """
    import torch
    from torch.nn.modules import transformer
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:
        return

    def detect(mask, is_causal=None, size=None):
        if is_causal is None and mask is not None and mask.requires_grad:
            causal = torch.full((size or mask.size(-2),) * 2, -float("inf"), dtype=mask.dtype, device=mask.device).triu(1)
            return mask.shape == causal.shape and bool((mask == causal).all())
        return is_causal is True

    with contextlib.suppress(ValueError):  # somebody else substituted it before
        torch.compiler.substitute_in_graph(original)(detect)


def size_hint(shape_env, expression) -> int:
    """A representative value of a symbolic size; adds no guard."""
    hint = getattr(shape_env, "optimization_hint", None)  # torch 2.12 on; size_hint before
    return int(hint(expression, fallback=1024) if hint is not None else shape_env.size_hint(expression, allow_none=True) or 1024)


@functools.cache
def _runtime_knobs():
    from triton import knobs
    return knobs.runtime


def launch_hooked() -> bool:
    """Is somebody (a profiler) watching Triton's launches?"""
    runtime = _runtime_knobs()
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def tf32_allowed() -> bool:
    """May float32 matrix products use TF32? Reading `allow_tf32` raises where only the newer setting was made."""
    import torch
    own = torch.backends.cuda.matmul.fp32_precision
    return (own if own != "none" else torch.backends.fp32_precision) == "tf32"


def direct_launch(compiled):
    """(function, fixed, separate): a compiled Triton kernel starts by function(x, y, z of the grid, stream, *fixed, arguments), the C function that
    Triton's own launch ends in.

    Arguments are numbers, addresses and tensor maps, descriptors expanded: `separate` ones or one list. None where this release of Triton cannot be
    driven so.
    """
    launcher = compiled.run
    launch = getattr(launcher, "launch", None)
    if getattr(launch, "__closure__", None):  # wrapped to expand descriptors
        launch = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__))).get("launcher")
    if launch is None or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    fixed = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    packed = compiled.packed_metadata
    if hasattr(launcher, "kernel_signature"):  # Triton 3.7
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature
        return launch, (*fixed, packed, None, None, None, None, None, annotations, signature), False
    return launch, (*fixed, None, None, packed, None, None, None), True  # Triton 3.6


def spilled(compiled) -> int:
    """Bytes of a thread that a compiled kernel spills, as the driver reports when it is loaded; more than any where it takes more than the card has."""
    from triton.runtime.errors import OutOfResources
    try:
        compiled.run  # loads it
    except OutOfResources:
        return sys.maxsize
    return 4 * compiled.n_spills


def descriptor_metadata(compiled) -> list:
    """How each tensor descriptor of a compiled kernel is laid out in shared memory; empty if it has none."""
    return list(getattr(compiled.metadata, "tensordesc_meta", None) or [])


def expanded_descriptor(descriptor, metadata) -> list:
    """What Triton's launcher passes for a tensor descriptor: the tensor map, then shape and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg
    return list(make_tensordesc_arg(descriptor, metadata))


def empty_strided(device):
    """(shape, stride, dtype) -> uninitialised tensor on the current device of this type, by the cheapest way there is."""
    import torch
    guards = torch._C._dynamo.guards
    own = getattr(guards, f"_empty_strided_{device.type}", None)
    return own or (lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device.type))


def gluon_barrier():
    """Gluon's barrier among the warps of a partition: `thread_barrier` until Triton 3.6, `barrier` after."""
    from triton.experimental.gluon import language as gl
    return getattr(gl, "barrier", None) or gl.thread_barrier


@functools.cache
def gluon_reduce_add():
    """Gluon's TMA reduction, reduce_add(descriptor, coordinates, tile in shared memory); Triton 3.6 and 3.7 have no name for it."""
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def reduce_add(descriptor, coordinates, tile, _semantic=None):
        coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle)

    return reduce_add
