"""One meaning, one spec: a product of spellings, every point of which must be fused and lifted to the spec of its meaning."""
from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .capture import capture, compare, keep, rand
from .thinning import thinned

B, H, GROUP, M, N, D = 2, 4, 2, 5, 7, 4
SCALE = D ** -0.5
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Point:
    """One way to write attention; `meaning` is what all ways of one group share."""

    mask: str = "none"
    scale: str = "scores *"
    softmax: str = "F.softmax"
    layout: str = "4-D"
    product: str = "@"
    gqa: str = "none"
    dropout: str = "none"

    @property
    def meaning(self) -> tuple[str, ...]:
        what = self.mask.partition(":")[0]
        axes = {"3-D": "b", "5-D": "b w h"}.get(self.layout, "b h")  # a flat batch of heads falls into its parts again
        return what, axes, "grouped" if self.gqa != "none" else "", "dropped" if self.dropout != "none" else ""

    def __str__(self) -> str:
        return " | ".join(str(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != "none")


# ---------------------------------------------------------------------------------------------------- the choices

def _written_out(s, shift=True):
    e = torch.exp(s - s.amax(-1, keepdim=True)) if shift else torch.exp(s)
    return e / e.sum(-1, keepdim=True)


SOFTMAX = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "torch.softmax, last dim": lambda s: torch.softmax(s, s.dim() - 1),
    "module": lambda s: nn.Softmax(dim=-1)(s),
    "float32 and back": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "upcast scores": lambda s: s.float().softmax(-1).type_as(s),
    "exp of log_softmax": lambda s: F.log_softmax(s, -1).exp(),
    "exp of the difference": lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)),
    "written out": _written_out,
    "written out, detached maximum": lambda s: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(s - s.max(-1, keepdim=True).values.detach())),
    "written out, sum put back": lambda s: (lambda e: e / e.sum(-1)[..., None])(torch.exp(s - s.amax(-1, keepdim=True))),
    "written out, no shift": partial(_written_out, shift=False),
    "normalised twice": lambda s: (lambda p: p / p.sum(-1, keepdim=True))(s.softmax(-1) * (torch.arange(s.shape[-1]) >= 0)),
    "of shifted scores": lambda s: F.softmax(s + 3.0, -1),
    "other axis, transposed": lambda s: s.transpose(-1, -2).softmax(-2).transpose(-1, -2),
}
SCORE_SCALES = {
    "scores *": lambda s: s * SCALE,
    "scores /": lambda s: s / math.sqrt(D),
    "constant first": lambda s: SCALE * s,
    "in place": lambda s: s.mul_(SCALE),
    "in place, divided": lambda s: s.div_(math.sqrt(D)),
    "tensor": lambda s: s * torch.tensor(SCALE),
    "twice": lambda s: s * 2.0 * (SCALE / 2),
    "divided by a tensor": lambda s: s / torch.full([], math.sqrt(D)),
}
OPERAND_SCALES = {
    "q *": lambda q, k: (q * SCALE, k), "q /": lambda q, k: (q / math.sqrt(D), k), "k *": lambda q, k: (q, k * SCALE),
    "q and k": lambda q, k: (q * SCALE ** 0.5, k * SCALE ** 0.5), "torch.div(q)": lambda q, k: (torch.div(q, D ** 0.5), k),
}


def _triangle(m, n):
    return torch.ones(m, n, dtype=torch.bool).tril()


def _offset(s):
    return torch.arange(s.shape[-1])[None, :] <= torch.arange(s.shape[-2])[:, None]


def _pad(pad, s):
    return pad[:, None, None, :]


# by meaning: what hides (causal, padding), the constant (inf, lowest), replaced or added
MASKS = {
    "none": lambda s, pad: s,
    "causal, inf: masked_fill": lambda s, pad: s.masked_fill(~_triangle(*s.shape[-2:]), float("-inf")),
    "causal, inf: masked_fill of triu": lambda s, pad: s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf),
    "causal, inf: in place": lambda s, pad: s.masked_fill_(~_triangle(*s.shape[-2:]), float("-inf")),
    "causal, inf: where": lambda s, pad: torch.where(_triangle(*s.shape[-2:]), s, float("-inf")),
    "causal, inf: arange": lambda s, pad: s.masked_fill(~_offset(s), float("-inf")),
    "causal, inf: added triu of -inf": lambda s, pad: s + torch.full(s.shape[-2:], float("-inf")).triu(1),
    "causal, inf: added where": lambda s, pad: s + torch.where(_offset(s), 0.0, float("-inf")),
    "causal, inf: added zeros masked": lambda s, pad: s + torch.zeros(s.shape[-2:]).masked_fill(~_offset(s), -math.inf),
    "causal, inf: tril == 0": lambda s, pad: s.masked_fill(torch.tril(torch.ones(s.shape[-2:])) == 0, float("-inf")),
    "causal, inf: log of tril": lambda s, pad: s + _triangle(*s.shape[-2:]).float().log(),
    "causal, lowest: masked_fill": lambda s, pad: s.masked_fill(~_triangle(*s.shape[-2:]), LOWEST),
    "causal, lowest: where, tensor": lambda s, pad: torch.where(_offset(s), s, torch.tensor(LOWEST)),
    "causal, lowest: where, full": lambda s, pad: torch.where(_triangle(*s.shape[-2:]), s, torch.full([], LOWEST)),
    "causal, lowest added: one minus": lambda s, pad: s + (1.0 - _triangle(*s.shape[-2:]).float()) * LOWEST,
    "causal, lowest added: where": lambda s, pad: s + torch.where(_offset(s), 0.0, LOWEST),
    "causal, lowest added: full triu": lambda s, pad: s + torch.full(s.shape[-2:], LOWEST).triu(diagonal=1),
    "padding, inf: masked_fill": lambda s, pad: s.masked_fill(~_pad(pad, s), float("-inf")),
    "padding, inf: logical_not": lambda s, pad: s.masked_fill(torch.logical_not(_pad(pad, s)), float("-inf")),
    "padding, inf: where": lambda s, pad: torch.where(_pad(pad, s), s, float("-inf")),
    "padding, inf: expanded": lambda s, pad: s.masked_fill(~_pad(pad, s).expand(-1, 1, s.shape[-2], -1), float("-inf")),
    "padding, inf: == False": lambda s, pad: s.masked_fill(_pad(pad, s) == False, float("-inf")),  # noqa: E712
    "padding, inf: added": lambda s, pad: s + torch.zeros(pad.shape).masked_fill(~pad, -math.inf)[:, None, None],
    "padding, lowest added: one minus": lambda s, pad: s + ((1.0 - pad.float()) * LOWEST)[:, None, None, :],
    "padding, lowest added: where": lambda s, pad: s + torch.where(_pad(pad, s), 0.0, LOWEST),
    "padding, lowest added: inverted": lambda s, pad: s + (1.0 - _pad(pad, s).to(s.dtype)).masked_fill((1.0 - _pad(pad, s).to(s.dtype)).bool(), LOWEST),
    "padding and causal, inf: one mask": lambda s, pad: s.masked_fill(~(_pad(pad, s) & _offset(s)), float("-inf")),
    "padding and causal, inf: two masks": lambda s, pad: s.masked_fill(~_offset(s), -math.inf).masked_fill(~_pad(pad, s), -math.inf),
    "padding and causal, inf: either": lambda s, pad: s.masked_fill(~_pad(pad, s) | ~_triangle(*s.shape[-2:]), float("-inf")),
    "padding and causal, inf: product": lambda s, pad: s.masked_fill(_pad(pad, s) * _offset(s) == 0, float("-inf")),
    "window, inf: two comparisons": lambda s, pad: s.masked_fill(~(_offset(s) & (_columns(s) > _rows(s) - 3)), float("-inf")),
    "window, inf: distances": lambda s, pad: s.masked_fill(((_rows(s) - _columns(s)) < 0) | ((_rows(s) - _columns(s)) >= 3), -math.inf),
    "window, inf: tril minus tril": lambda s, pad: s.masked_fill(~(_triangle(*s.shape[-2:]) & torch.ones(s.shape[-2:], dtype=torch.bool).triu(-2)), -math.inf),
}


def _rows(s):
    return torch.arange(s.shape[-2]).unsqueeze(-1)


def _columns(s):
    return torch.arange(s.shape[-1]).unsqueeze(0)


DROPOUT = {
    "none": lambda p: p,
    "F.dropout": lambda p: F.dropout(p, 0.25),
    "module": lambda p: nn.Dropout(0.25)(p),
    "torch.dropout": lambda p: torch.dropout(p, 0.25, True),
    "before a cast": lambda p: F.dropout(p.float(), p=0.25, training=True).to(p.dtype),
    "in place": lambda p: F.dropout(p, 0.25, True, True),
}
GQA = {
    "none": lambda t: t,
    "expand and reshape": lambda t: t[:, :, None].expand(B, H // GROUP, GROUP, t.shape[2], D).reshape(B, H, t.shape[2], D),
    "repeat_interleave": lambda t: t.repeat_interleave(GROUP, dim=1),
    "repeat and flatten": lambda t: t.unsqueeze(2).repeat(1, 1, GROUP, 1, 1).flatten(1, 2),
    "stack": lambda t: torch.broadcast_to(t.unsqueeze(2), (B, H // GROUP, GROUP, t.shape[2], D)).contiguous().view(B, H, -1, D),
}
# first and second product
PRODUCTS = {
    "4-D": {
        "@": (lambda q, k: q @ k.transpose(-1, -2), lambda p, v: p @ v),
        "matmul, mT": (lambda q, k: torch.matmul(q, k.mT), torch.matmul),
        "matmul, permute": (lambda q, k: q.matmul(k.permute(0, 1, 3, 2)), lambda p, v: p.matmul(v)),
        "einsum": (partial(torch.einsum, "bhid,bhjd->bhij"), partial(torch.einsum, "bhij,bhjd->bhid")),
        "einsum, other letters": (partial(torch.einsum, "nkqz,nksz->nkqs"), partial(torch.einsum, "nkqs,nksz->nkqz")),
        "einsum, keys first": (lambda q, k: torch.einsum("xyjc,xyic->xyij", k, q), lambda p, v: torch.einsum("xyjc,xyij->xyic", v, p)),
        "einsum, dots": (partial(torch.einsum, "...id,...jd->...ij"), partial(torch.einsum, "...ij,...jd->...id")),
        "keys times queries": (lambda q, k: (k @ q.mT).mT, lambda p, v: (v.mT @ p.mT).mT),
    },
    "heads last": {
        "einsum": (lambda q, k: torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2)),
                   lambda p, v: torch.einsum("bhij,bjhd->bihd", p, v.transpose(1, 2)).transpose(1, 2)),
        "contiguous": (lambda q, k: q.transpose(1, 2).contiguous().transpose(1, 2) @ k.permute(0, 3, 1, 2).contiguous().permute(0, 2, 1, 3),
                       lambda p, v: (p @ v).transpose(1, 2).contiguous().transpose(1, 2)),
    },
    "flat": {
        "bmm": (lambda q, k: torch.bmm(q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]).transpose(1, 2)),
                lambda p, v: torch.bmm(p, v.reshape(-1, *v.shape[-2:])).view(B, H, -1, D)),
        "baddbmm": (lambda q, k: torch.baddbmm(q.new_empty(B * H, q.shape[2], k.shape[2]), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0),
                    lambda p, v: (p @ v.flatten(0, 1)).unflatten(0, (B, H))),
    },
    "3-D": {
        "bmm": (lambda q, k: torch.bmm(q, k.transpose(1, 2)), torch.bmm),
        "@": (lambda q, k: q @ k.mT, lambda p, v: p @ v),
        "einsum": (partial(torch.einsum, "bid,bjd->bij"), partial(torch.einsum, "bij,bjd->bid")),
        "baddbmm": (lambda q, k: torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0, alpha=1.0), torch.bmm),
    },
    "5-D": {
        "@": (lambda q, k: q @ k.mT, lambda p, v: p @ v),
        "einsum": (partial(torch.einsum, "bwhid,bwhjd->bwhij"), partial(torch.einsum, "bwhij,bwhjd->bwhid")),
    },
}


def build(p: Point):
    """The function of (q, k, v, pad) that `p` describes."""
    first, second = PRODUCTS[p.layout][p.product]

    def fn(q, k, v, pad):
        k, v = GQA[p.gqa](k), GQA[p.gqa](v)
        if p.scale in OPERAND_SCALES:
            q, k = OPERAND_SCALES[p.scale](q, k)
        s = first(q, k)
        if p.scale in SCORE_SCALES:
            s = SCORE_SCALES[p.scale](s)
        if p.layout == "flat" and p.mask.startswith("padding"):
            s = MASKS[p.mask](s.view(B, H, M, N), pad).view(B * H, M, N)
        else:
            s = MASKS[p.mask](s, pad)
        return second(DROPOUT[p.dropout](SOFTMAX[p.softmax](s)), v)

    return fn


def inputs(p: Point, grad: bool = True):
    heads = H // GROUP if p.gqa != "none" else H
    shape = {"3-D": (B,), "5-D": (B, 3, H)}.get(p.layout)
    q, k, v = (rand(*(shape or (B, h)), n, D, grad=grad, seed=s) for s, (h, n) in enumerate(((H, M), (heads, N), (heads, N))))
    return q, k, v, keep(B, N)


def points() -> list[Point]:
    """Every choice alone against the plainest spelling, and a fixed sample of the product."""
    found = dict.fromkeys(
        Point(mask=m, layout=layout, product=product)
        for m, layout in itertools.product(MASKS, PRODUCTS) for product in PRODUCTS[layout])
    every = [(dict(softmax=s)) for s in SOFTMAX] + [dict(scale=s) for s in (*SCORE_SCALES, *OPERAND_SCALES)] \
        + [dict(gqa=g) for g in GQA] + [dict(dropout=d) for d in DROPOUT]
    found |= dict.fromkeys(Point(**one) for one in every)
    pick = random.Random(0)
    while len(found) < 900:
        layout = pick.choice(list(PRODUCTS))
        found[Point(pick.choice(list(MASKS)), pick.choice([*SCORE_SCALES, *OPERAND_SCALES]), pick.choice(list(SOFTMAX)), layout,
                    pick.choice(list(PRODUCTS[layout])), pick.choice(list(GQA)), pick.choice(list(DROPOUT)))] = None
    return [p for p in found if _makes_sense(p)]


def _makes_sense(p: Point) -> bool:
    if p.softmax in ("exp of the difference", "written out, no shift", "normalised twice") and "lowest" in p.mask:
        return False  # rows that are hidden entirely yield something else
    return p.layout not in ("3-D", "5-D") or p.gqa == "none" and not p.mask.startswith("padding")


POINTS = points()
MEANINGS = {m: [p for p in POINTS if p.meaning == m] for m in dict.fromkeys(p.meaning for p in POINTS)}


def test_enough_points():
    assert len(POINTS) >= 500
    assert all(any(getattr(p, f.name) == choice for p in POINTS) for f, choices in zip(
        fields(Point), (MASKS, {**SCORE_SCALES, **OPERAND_SCALES}, SOFTMAX, PRODUCTS, {}, GQA, DROPOUT)) for choice in choices)


def together(group):
    """One function for a whole group: Dynamo's set-up costs more than a site."""
    return lambda calls: [build(p)(*args) for p, args in zip(group, calls)]


@pytest.mark.parametrize("meaning", thinned(((m,) for m in MEANINGS), 7), ids=lambda m: ", ".join(filter(None, m)))
def test_one_spec_per_meaning(meaning):
    group = MEANINGS[meaning]
    regions = []
    for start in range(0, len(group), 16):
        part = group[start: start + 16]
        regions += capture(together(part), [inputs(p) for p in part])
    assert len(regions) == len(group)
    wrong = [f"{p}: {r.refusal}" for p, r in zip(group, regions) if not r.fused]
    assert not wrong, "\n".join(wrong)
    texts = {}
    for p, r in zip(group, regions):
        texts.setdefault(str(r.spec), p)
    assert len(texts) == 1, "\n".join(f"{p}\n{text}" for text, p in texts.items())


def test_meanings_differ():
    groups = {m: group[0] for m, group in MEANINGS.items()}
    regions = capture(together(list(groups.values())), [inputs(p) for p in groups.values()])
    assert len({str(r.spec) for r in regions}) == len(groups)


SAMPLE = [p for p in POINTS if p.dropout == "none"][::9]


@pytest.mark.parametrize("p", SAMPLE, ids=str)
def test_values_and_gradients(p):
    regions = compare(build(p), *inputs(p))
    assert [r.fused for r in regions] == [True]
