"""The same cases on a GPU, with the tiles that the plan chooses."""
from __future__ import annotations

import itertools

import pytest
import torch

from .cases import CORE, KINDS, MORE, problem, spec
from .run import lse_gradient, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DTYPES, HEADS, LENGTHS = ("float16", "bfloat16", "float32"), (16, 40, 64, 80, 128), (37, 200, 321)
POINTS = [(v, kind, DTYPES[n % 3], HEADS[n % 5], LENGTHS[n // 5 % 3]) for n, (v, kind) in enumerate(itertools.product({**CORE, **MORE}, KINDS))]


@pytest.mark.parametrize("variant, kind, dtype, head, length", POINTS)
def test_cases(variant, kind, dtype, head, length):
    run(spec({**CORE, **MORE}[variant], kind), problem(kind, head, dtype, M=length), "cuda").within_budget()


@pytest.mark.parametrize("variant, kind, dtype", [("full", "self", "bfloat16"), ("causal", "gqa", "bfloat16"), ("softcap", "cross", "float16")])
def test_gradient_of_the_log_sum_exp(variant, kind, dtype):
    lse_gradient(spec(CORE[variant], kind), problem(kind, 64, dtype, M=200), "cuda").within_budget()
