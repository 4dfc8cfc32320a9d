"""Tests run in a process for each core (pytest-xdist, see the Makefile): each takes one thread."""
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    torch.set_num_threads(1)

LONGEST = ("test_simulator.py", "test_interpreter.py")
"""Each of their tests is a process that takes a minute or two: started last, one would run alone at the end."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)
