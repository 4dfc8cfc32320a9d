"""Random attention-like PyTorch programs, compiled and compared with eager; `python -m tests.random_programs` runs many of them.

    program = write(random.Random(7))      # a Program: source text, inputs, whether it is attention that should be fused
    outcome = check(program)               # raises Wrong if outputs, changed inputs or gradients are not eager's
"""
from .check import Outcome, Wrong, check
from .write import Program, write

__all__ = ["Outcome", "Program", "Wrong", "check", "write"]
