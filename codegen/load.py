"""Generated text -> imported module. The file stays on disk, so that tracebacks, debuggers and `inspect.getsource` show it."""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
from types import ModuleType


def cache_dir() -> str:
    """`flashfx` under TORCHINDUCTOR_CACHE_DIR if that is set, else under the system's directory for temporary files."""
    return os.path.join(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir(), "flashfx")


def write(text: str) -> str:
    """Path of a file with this text, named by its hash. Written atomically: other processes see all of it or nothing."""
    directory = cache_dir()
    path = os.path.join(directory, f"attention_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py")
    if not os.path.exists(path):
        os.makedirs(directory, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    return path


@functools.lru_cache(maxsize=None)
def load(text: str) -> ModuleType:
    """The module of a generated text; the same text gives the same module, and so compiles once."""
    path = write(text)
    name = f"flashfx_generated_{os.path.basename(path)[:-3]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
