"""Python programs in a process of their own that need not import PyTorch and its compilers first, which takes eight seconds of each: a process that has
imported them forks one for each program. For programs that read no environment variable while those are imported."""
from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """What `python *arguments` does there, a script or -m and a module first. environment: variables that differ from this process's."""
    words = [str(a) for a in arguments]
    server = _server()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = dict(words=words, cwd=str(cwd), environment=environment, files=[out.name, err.name])
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


@functools.cache
def _server() -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-m", "tests.forked"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.terminate)
    return process


def _program(words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> int:
    """In the forked process."""
    os.chdir(cwd)
    os.environ.update(environment)
    for number, path in zip((1, 2), files):
        os.dup2(os.open(path, os.O_WRONLY), number)
    module = words[0] == "-m"
    sys.argv = words[module:]
    sys.path[0] = cwd if module else str(Path(cwd, words[0]).parent)
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True) if module else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as Python ends a program
        traceback.print_exc()
        return 1
    return 0


def _serve() -> None:
    import torch._inductor.compile_fx  # noqa: F401
    import transformers.modeling_utils  # noqa: F401
    import flashfx.backend  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                code = _program(**json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
