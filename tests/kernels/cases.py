"""Specs that the kernel tests share: what is scored and masked (variants) times which operand varies along which axis (kinds)."""
from __future__ import annotations

from dataclasses import dataclass

from flashfx.region import Problem
from flashfx.spec import AttentionSpec


@dataclass(frozen=True)
class Variant:
    """Lines of a spec: captured tensors, score (of `qk`), mask, empty rows, dropout."""

    given: tuple[str, ...] = ()
    score: str = "qk * 0.125"
    where: str = ""
    empty: str = "nan"
    drop: str = ""


CORE = {
    "full": Variant(),
    "causal": Variant(where="j <= i"),
    "padding": Variant(("pad: bool[2]",), where="pad[b, j]", empty="mean, additive"),
    "window": Variant(where="(j <= i) & (i - j < 11)"),
    "bias": Variant(("bias: float[4]",), score="qk * 0.125 + bias[b, h, i, j]"),
    "bool_mask": Variant(("keep_pair: bool[4]",), where="keep_pair[b, 0, i, j]", empty="zero"),
    "softcap": Variant(score="tanh(qk * 0.125 / 3.0) * 3.0", where="j <= i"),
}

MORE = {
    "shared_bias": Variant(("bias: float[4]",), score="qk * 0.125 + bias[0, h, i, j]", where="j <= i"),
    "scaled_bias": Variant(("bias: float[4]",), score="(qk + bias[b, h, i, j]) * 0.15", where="j <= i"),
    "scaled_shared_bias": Variant(("bias: float[4]",), score="(qk + bias[0, h, i, j]) * 0.15"),
    "two_biases": Variant(("bias: float[4]", "near: float[4]"), score="(qk + bias[b, h, i, j]) * 0.15 + near[b, h, i, j]"),
    "two_shared_biases": Variant(("bias: float[4]", "near: float[3]"), score="qk * 0.125 + bias[0, h, i, j] + near[h, i, j] * 3.0", where="j <= i"),
    "decomposed": Variant(("rel: float[4]", "across: float[4]"), score="qk * 0.125 + rel[b, h, i, j // 8] + across[b, h, i, j % 8]"),
    "decomposed_rows": Variant(("rel: float[5]", "across: float[5]"), score="qk * 0.125 + rel[b, h, i // 8, i % 8, j // 8] + across[b, h, i // 8, i % 8, j % 8]"),
    "additive_mask": Variant(("bias: float[4]",), score="qk * 0.125 + bias[b, h, i, j]", where="bias[b, h, i, j] > (-1.5)",
                             empty="mean, additive over bias[b, h, i, j] > (-2.5)"),
    "padded_bias": Variant(("bias: float[3]", "pad: bool[2]"), score="qk + bias[h, i, j]", where="pad[b, j]", empty="mean, additive"),
    "alibi": Variant(("slope: float[1]",), score="qk * 0.125 + slope[h] * to_float(j - i)", where="j <= i"),
    "alibi_by_key": Variant(("slope: float[1]",), score="qk * 0.125 + slope[h] * to_float(j - N + 1)", where="j <= i"),
    "distances": Variant(("slope: float[1]", "tilt: float[1]"), score="qk * 0.125 - slope[h] * to_float(abs(j - i + 3)) * 0.2 + tilt[i] * to_float(2 * j - i) * 0.1"),
    "t5_table": Variant(("table: float[2]",), score="qk + table[minimum(maximum(j - i + 4, 0), 8), h]"),
    "relative": Variant(("rel: float[2]",), score="qk * 0.125 + rel[h, j - i + M - 1]"),
    "relative_causal": Variant(("rel: float[3]",), score="tanh(qk * 0.125 + rel[b, j - i + M - 1, h] * 2.0)", where="j <= i", drop="0.1"),
    "ended": Variant(("ends: int[1]", "rel: float[2]"), score="qk * 0.125 + rel[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])]"),
    "ended_dropout": Variant(("ends: int[1]", "rel: float[2]"), where="j <= i", drop="0.1",
                             score="qk * 0.125 + rel[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])] * 0.5"),
    "ended_causal": Variant(("lo: int[1]", "rel: float[2]", "near: float[3]"), where="j <= i", drop="0.1",
                            score="tanh(qk * 0.125 + rel[minimum(maximum(j - i + M - 1, lo[h]), M - 1), h] * 2.0 + near[0, minimum(maximum(j - i + 9, 0), 12), b])"),
    "documents": Variant(("doc: int[2]",), where="(doc[b, i] == doc[b, j]) & (j <= i)", empty="zero"),
    "lengths": Variant(("length: int[1]",), where="j < length[b]", empty="zero"),
    "prefix": Variant(("prefix: int[1]",), where="(j <= i) | (j < prefix[b])"),
    "chunked": Variant(where="(i // 24 == j // 24) & (j <= i)"),
    "band": Variant(where="abs(i - j) <= 6", empty="zero"),
    "global": Variant(where="(j < 5) | (i < 5) | (abs(i - j) < 4)"),
    "dilated": Variant(where="((j - i) % 3 == 0) & (j <= i)"),
    "temperature": Variant(("heat: float[2]",), score="qk * 0.125 / (1.5 + heat[b, i] * heat[b, i])", where="j <= i"),
    "column_bias": Variant(("weight: float[2]",), score="qk * 0.125 + weight[h, j]"),
    "two_reads": Variant(("w: float[2]",), score="qk * 0.125 + w[h, i] + w[h, j]"),
    "transposed_bias": Variant(("bias: float[3]",), score="qk * 0.125 + bias[h, j, i]"),
    "sigmoid_gate": Variant(("gate: float[1]",), score="qk * sigmoid(gate[h])", where="j <= i"),
    "mean_left_padding": Variant(("pad: bool[2]",), where="(j <= i) & pad[b, j]", empty="mean"),
    "additive_left_padding": Variant(("pad: bool[2]",), where="(j <= i) & pad[b, j]", empty="mean, additive over j <= i"),
    "dropout": Variant(where="j <= i", drop="0.25"),
    "dropout_padding": Variant(("pad: bool[2]",), where="pad[b, j] & (j <= i)", empty="mean, additive", drop="0.1"),
    "padded_softcap": Variant(("pad: bool[2]",), score="tanh(qk * 0.125 / 3.0) * 3.0", where="pad[b, j] & (j <= i)", empty="mean, additive"),
}

KINDS = {"self": "(b, h), (b, h)", "cross": "(b, h), (b, h)", "gqa": "(b, h, g), (b, h)"}


def spec(variant: Variant, kind: str = "self") -> AttentionSpec:
    q, k = ("b, h, g", "b, h") if kind == "gqa" else ("b, h", "b, h")
    lines = [f"attention[{q}, i, j]", *(f"  given   {g}" for g in variant.given), f"  qk = q[{q}, i] . k[{k}, j]", f"  score = {variant.score}"]
    if variant.where:
        lines += [f"  where {variant.where}", f"  empty {variant.empty}"]
    if variant.drop:
        lines.append(f"  drop {variant.drop}")
    return AttentionSpec.parse("\n".join([*lines, f"  out = softmax_j(score) . v[{k}, j]"]))


def problem(kind: str = "self", D: int = 16, dtype: str = "float32", M: int = 37, N: int | None = None, batch: int = 2, heads: int = 2,
            Dv: int | None = None, v_dtype: str | None = None) -> Problem:
    """Small shapes whose lengths are no multiple of a tile; cross attention has another number of keys."""
    extents = (batch, heads, 2) if kind == "gqa" else (batch, heads)
    N = N if N is not None else M + 14 if kind == "cross" else M
    return Problem(extents, M, N, D, Dv or D, dtype, v_dtype or dtype)


IDS = {
    "packed": lambda at: at // 50,
    "high words": lambda at: at // 50 << 32,
    "both words": lambda at: (at // 50 << 32) + at // 20,
    "negative": lambda at: at // 50 - 3,
    "32 bits": lambda at: (at // 50 - 3).int(),
    "unsorted": lambda at: at // 50 * 7 % 5 - 2,
}
"""Position -> id of its document, int64 unless said otherwise: what tells them apart need not be the low word."""


PAST = {"j <= i": "front", "(j <= i) & (i - j < 70)": "front, back", "j >= i": "back", "j < length[b]": "", "(j <= i) & pad[b, j]": "front", "(j <= i) & (j < length[b])": "front"}
"""Masks, and where a half of a tile of keys goes past rows of the Hopper backward."""


def soft_capped(where: str) -> AttentionSpec:
    """Under one of those."""
    given = tuple(g for g in ("length: int[1]", "pad: bool[2]") if g.split(":")[0] in where)
    return spec(Variant(given, score="tanh(qk * 0.125 / 3.0) * 3.0", where=where, empty="zero"))
