import torch, sys
from tests.kernels.cases import *
from flashfx.codegen import plan, launch
from flashfx.codegen.selfcheck import inputs
for v, d, kind in (("causal", 64, "gqa"), ("causal", 128, "self")):
    s, p = spec({**CORE, **MORE}[v], kind), problem(kind, d, "bfloat16", M=300, batch=1)
    q, k, vv, aux, seed, sizes = inputs(s, p, "cuda")
    with plan.overridden(schedule="hopper"):
        out, lse = launch.forward(s, q, k, vv, aux, seed, sizes)
        g = launch.backward(s, torch.randn_like(out), q, k, vv, aux, seed, out, lse, sizes, (True,) * 3)
    torch.cuda.synchronize()
    print("ran", v, d, all(x.isfinite().all().item() for x in (out, *g)))
