"""`python -m flashfx gpu`: the row that plans are made from, or one measured here; `doctor`: what works on this machine."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path

import torch

from ..codegen.gpu import DEFAULT, GPU, KIB, current
from ..codegen.load import cache_dir
from .measure import median_ms


def row_text(row: GPU) -> str:
    """One line a number, in the units of data sheets."""
    shown = {
        "name": row.name, "compute capability": "{}.{}".format(*row.capability), "multiprocessors": row.sms,
        "shared memory": f"{row.shared_per_block // KIB} KiB a block, {row.shared_per_sm // KIB} KiB a multiprocessor",
        "registers": f"{row.registers // 1024}k a multiprocessor", "L2 cache": f"{row.l2 / KIB ** 2:.3g} MiB", "clock": f"{row.clock / 1e9:.3g} GHz",
        "device memory": f"{row.bandwidth / 1e9:.0f} GB/s", "matrix products": f"{row.matrix_rate / 1e12:.0f} TFLOP/s (16 bit, float32 sums)",
        "exponentials": f"{row.exp_rate / 1e12:.2f} T/s", "source": row.source,
        "cost model": "calibrated on this card" if row.measured else "not measured on this card: takes the H200's shares of the peak",
    }
    return "\n".join(f"{name:<20}{value}" for name, value in shown.items())


def measured(device: torch.device) -> dict[str, float]:
    """bandwidth (bytes/s of a copy, both ways), matrix_rate (bf16 or fp16, 8192^3), exp_rate (1/s), launch (s, host) on this device."""
    import triton
    import triton.language as tl

    @triton.jit
    def exponentials(Out, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = at.to(tl.float32) * -1e-9
        for _ in range(ROUNDS):
            x = tl.exp2(x) - 1.0
        tl.store(Out + at, x)

    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    source = torch.empty(2 ** 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source), device)
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    product = median_ms(lambda: a @ a, device)
    programs, block, rounds = 8 * torch.cuda.get_device_properties(device).multi_processor_count, 1024, 4096
    exp = median_ms(lambda: exponentials[(programs,)](target, rounds, block), device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(200):
        exponentials[(1,)](target, 1, block)
    launch = (time.perf_counter() - start) / 200
    torch.cuda.synchronize(device)
    return {"bandwidth": 2 * source.nbytes / copy * 1e3, "matrix_rate": 2 * 8192 ** 3 / product * 1e3,
            "exp_rate": programs * block * rounds / exp * 1e3, "launch": launch}


def measured_row(row: GPU, found: dict[str, float]) -> str:
    """The measured rates as a row of `flashfx/codegen/gpu.py`."""
    k = lambda n: n // KIB
    return (f'_row("{row.name}", {row.capability}, {row.sms}, {k(row.shared_per_block)}, {k(row.shared_per_sm)}, {k(k(row.l2))}, {found["bandwidth"] / 1e9:.0f}, '
            f'{found["matrix_rate"] / 1e12:.0f}, {row.clock / 1e9:.3g}, "measured by python -m flashfx gpu --measure"),')


def report() -> tuple[list[str], bool]:
    """(lines, is everything that generated kernels need here?)."""
    from .. import compat
    lines, good = [], True

    def say(state: bool | None, what: str) -> None:
        nonlocal good
        good &= state is not False
        lines.append(f"{'ok  ' if state else 'note' if state is None else 'FAIL'}  {what}")

    say(tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11), f"Python {platform.python_version()} (3.11 or newer)")
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    say(version >= (2, 11), f"torch {torch.__version__} (2.11 or newer)")
    try:
        found = importlib.metadata.version("triton")
        say(tuple(int(n) for n in found.split(".")[:2]) >= (3, 6), f"triton {found} (3.6 or newer)")
    except importlib.metadata.PackageNotFoundError:
        say(False if torch.cuda.is_available() else None, "triton is not installed: no kernel can be generated; pip install triton")
    say(None if compat.interpreting() else True, "TRITON_INTERPRET is set: kernels run in Triton's interpreter, on the CPU, slowly" if compat.interpreting()
        else "Triton compiles (TRITON_INTERPRET is not set)")
    if torch.version.hip:
        say(False, "this PyTorch is built for AMD GPUs; generated kernels are for NVIDIA's: sites are left alone on the GPU")
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            row = current(index)
            say(row.capability >= (7, 0), f"GPU {index}: {torch.cuda.get_device_name(index)}, row {row.name} ({row.source.split(';')[0]})")
            lines.append(f"      {_takes(row)}")
    else:
        say(None, f"no GPU: the tiled PyTorch schedule runs; explain() plans for the {DEFAULT.name}")
    names = [e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")]
    say("flashfx" in names, 'torch.compile(backend="flashfx") is registered' if "flashfx" in names else
        'the backend is not registered with PyTorch: pip install flashfx, or import flashfx first')
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))), None)
    say(True if compiler else None, f"C++ compiler {compiler}" if compiler else "no C++ compiler: Inductor cannot compile for the CPU; use options={'inner': 'aot_eager'} there")
    where = Path(cache_dir())
    try:
        where.mkdir(parents=True, exist_ok=True)
        writable = os.access(where, os.W_OK)
    except OSError:
        writable = False
    say(writable, f"generated kernels are kept in {where}" if writable else f"{where} cannot be written: set TORCHINDUCTOR_CACHE_DIR to a folder that can")
    for package, extra, what in (("transformers", "hf", "HuggingFace models, explain --hf"), ("pygments", "report", "explain --html"),
                                 ("matplotlib", "report", "plots of bench")):
        try:
            say(True, f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            say(None, f"{package} is not installed ({what}): pip install 'flashfx[{extra}]'")
    return lines, good


def _takes(row: GPU) -> str:
    """What the generated kernels take on a card, and what runs there."""
    dtypes = "float16, bfloat16, float32" if row.capability >= (8, 0) else "float16, float32 (no bfloat16 matrix unit)"
    schedule = "warp-specialised and portable schedules" if row.capability == (9, 0) else "portable schedule"
    return f"kernels for {dtypes}; head sizes up to 256; {schedule}; float64 in the tiled PyTorch schedule"
