"""Random specs and shapes for the kernels: the seed is the spec."""
from __future__ import annotations

import random

from flashfx.region import Problem
from flashfx.spec import AttentionSpec

from .test_families import FAMILIES, GIVEN

STEPS = {
    "cap": ("tanh({} / 5.0) * 5.0", {}),
    "slopes": ("{} + slope[h] * to_float(j - i)", {"slope": "float[1]"}),
    "bias": ("{} + bias[b, h, i, j]", {"bias": "float[4]"}),
    "shared bias": ("{} + bias[0, h, i, j]", {"bias": "float[4]"}),
    "table": ("{} + table[minimum(maximum(j - i + 8, 0), 16), h]", {"table": "float[2]"}),
    "gate": ("{} * sigmoid(gate[h])", {"gate": "float[1]"}),
    "heat": ("{} / (1.5 + heat[b, i] * heat[b, i])", {"heat": "float[2]"}),
    "column": ("{} + weight[h, j]", {"weight": "float[2]"}),
    "far": ("where(i - j > 40, {} * 0.5, {})", {}),
    "scaled": ("{} * 0.7", {}),
}
MASKS = [text for text in FAMILIES.values() if "bias" not in text and "importance" not in text and text not in ("True", "i < 0")]
AXES = [("b, h", "b, h"), ("b, h", "b, h"), ("b, h", "b"), ("b, h, g", "b, h"), ("b, h", "h")]
HEADS = (16, 32, 40, 56, 64, 64, 72, 80, 96, 112, 120, 128, 128, 144, 160, 176, 192, 208, 256)


def draw(seed: int) -> tuple[AttentionSpec, Problem]:
    """A spec of up to two score steps and two masks, with rows that see no key, dropout, shared keys; a shape that is no multiple of a tile."""
    r = random.Random(seed)
    q, k = r.choice(AXES)
    score, given = f"qk * {r.choice([0.125, 0.25, 0.0883883])}", {}
    for step in r.sample(list(STEPS), r.choice([0, 0, 1, 1, 2])):
        text, names = STEPS[step]
        if not set(names) & set(given):
            score, given = text.replace("{}", f"({score})"), given | names
    masks = r.sample(MASKS, r.choice([0, 1, 1, 2]))
    where = f" {r.choice('&&|')} ".join(f"({m})" for m in masks)
    given |= {n: f"{kind}[{rank}]" for n, (kind, rank) in GIVEN.items() if f"{n}[" in where}
    lines = [f"attention[{q}, i, j]", *(f"given {n}: {what}" for n, what in sorted(given.items())), f"qk = q[{q}, i] . k[{k}, j]", f"score = {score}"]
    if where:
        lines += [f"where {where}", f"empty {r.choice(['nan', 'zero', 'mean', 'mean, additive'])}"]
    if r.random() < 0.25:
        lines.append("drop 0.1")
    spec = AttentionSpec.parse("\n".join([*lines, f"out = softmax_j(score) . v[{k}, j]"]))
    extents = tuple({"b": r.randint(1, 3), "h": r.randint(1, 4), "g": r.randint(1, 3)}[axis] for axis in spec.axes)
    length = lambda: r.choice([r.randint(1, 64), r.randint(65, 300), r.randint(301, 700), 256, 512])
    M = length()
    D = r.choice(HEADS)
    dtype = r.choice(["float16", "bfloat16", "bfloat16", "float32"])
    return spec, Problem(extents, M, M if r.random() < 0.6 else length(), D, D if r.random() < 0.85 else r.choice(HEADS), dtype, dtype)
