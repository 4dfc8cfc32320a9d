"""write: one random program, from the loading of q, k and v to the output."""
from __future__ import annotations

import random
import string

import torch

from .mask import Frame, mask, term
from .writer import Program, Writer


def write(r: random.Random) -> Program:
    """A program by the choices of `r`: two in three are attention, the others take a wrong turn."""
    w = Writer(r)
    w.wrong = w.chance(0.33)
    w.dtype = w.pick(*[torch.float32] * 5, torch.float64, torch.bfloat16, torch.float16)
    dynamic = w.chance(0.12)
    while True:
        _body(w, dynamic)
        if w.wrong == bool(w.turns):
            break
        w.lines, w.inputs, w.turns, w.named = [], {}, [], 0
    if w.dtype == torch.float64:
        w.lines = [text.replace("torch.float32", "torch.float64").replace(".float()", ".double()") for text in w.lines]
    source = f"def program({', '.join(w.inputs)}):\n" + "\n".join(f"    {text}" for text in w.lines) + "\n"
    return Program(source, dict(w.inputs), tuple(w.turns), dynamic, w.dtype)


def _body(w: Writer, dynamic: bool) -> None:
    layout = w.pick("2-D", "3-D", "4-D", "4-D", "5-D", "6-D", "heads last", "hidden", "packed", "flat", "time first")
    late = w.turn("keys changed in place", 0.05)
    w.differentiable = not late  # values may lie beside them
    q, k, v, f, values = _load(w, layout, False if late or w.chance(0.1) else None)
    flat = layout == "flat"
    s = _scores(w, q, k, f, flat)
    if flat and w.chance(0.7):
        s = w.let("s", f"{s}.view({', '.join(map(str, f.sizes))}, M, N)")
        unflat = True
    else:
        unflat = not flat
    inner = f if unflat else Frame([("bh", f.sizes[0] * f.sizes[1])], f.M, f.N)
    for _ in range(w.pick(0, 0, 0, 1, 1, 2)):
        s = term(w, s, inner)
    if w.turn("scores detached"):
        s = w.let("s", f"{s}.detach() + 0.0")
    if w.turn("scores through topk"):
        s = w.let("s", f"{s}.masked_fill({s} < {s}.topk(1, -1).values, float('-inf'))")
    if w.turn("running sum"):
        s = w.let("s", f"{s}.cumsum(-1)")
    masks = w.pick(0, 0, 1, 1, 1, 2)
    fill = w.pick("inf", "inf", "lowest", "lowest", "-1e9" if w.dtype not in (torch.float16,) else "lowest")
    for _ in range(masks):
        s = mask(w, s, inner, fill)
    if w.chance(0.1):
        s = term(w, s, inner)
    if flat and unflat:
        s = w.let("s", f"{s}.view({f.sizes[0] * f.sizes[1]}, M, N)")
    out = _weigh(w, s, v, f, flat, values)
    if late:
        w.line("k.zero_()")
    _finish(w, out, f, layout)


# ---------------------------------------------------------------------------------------------------- q, k and v

def _load(w: Writer, layout: str, grad: bool | None):
    B, H, W, D = w.pick(1, 2, 3), w.pick(1, 2, 4), w.pick(2, 3), w.pick(2, 4)
    w.head = D
    M = w.pick(1, 3, 5, 6)
    N = w.pick(M, M, 1, 4, 7)
    E = w.pick(D, D, D, 3)
    batch = {"2-D": [], "3-D": [("b", B)], "5-D": [("b", B), ("w", W), ("h", H)], "6-D": [("b", B), ("w", W), ("x", 2), ("h", H)]}.get(
        layout, [("b", B), ("h", H)])
    f = Frame(batch, M, N)
    load = lambda name, *shape: w.tensor(name, *shape, grad=grad)
    group = w.pick(2, H) if H % 2 == 0 and layout in ("4-D", "hidden", "heads last") and w.chance(0.35) else 1
    heads = H // group
    if layout == "packed":
        N, E = M, D
        f = Frame(batch, M, N)
        x = load("x", B, M, 3 * H * D)
        ways = [
            f"q, k, v = {x}.view({B}, -1, 3, {H}, {D}).permute(2, 0, 3, 1, 4)",
            f"q, k, v = (t.view({B}, -1, {H}, {D}).transpose(1, 2) for t in {x}.chunk(3, -1))",
            f"q, k, v = {x}.reshape({B}, -1, 3, {H}, {D}).transpose(1, 3).unbind(2)",
            f"q, k, v = (t.unflatten(-1, ({H}, {D})).permute(0, 2, 1, 3) for t in {x}.split({H * D}, dim=-1))",
        ]
        w.line(w.pick(*ways))
    elif layout in ("hidden", "time first"):
        for name, n, h, width in (("q", M, H, D), ("k", N, heads, D), ("v", N, heads, E)):
            if layout == "hidden":
                x = load(name, B, n, h * width)
                w.line(f"{name} = {x}.{w.pick('view', 'reshape')}({B}, -1, {h}, {width}).transpose(1, 2)")
            else:
                x = load(name, n, B, h * width)
                w.line(f"{name} = {x}.view({n}, {B} * {h}, {width}).transpose(0, 1).view({B}, {h}, -1, {width})")
    elif layout == "heads last":
        for name, n, h, width in (("q", M, H, D), ("k", N, heads, D), ("v", N, heads, E)):
            x = load(name, B, n, h, width)
            w.line(f"{name} = {x}.{w.pick('transpose(1, 2)', 'permute(0, 2, 1, 3)', 'swapaxes(1, 2).contiguous()')}")
    else:
        own = lambda h: [n for name, n in batch[:-1]] + [h] if batch else []
        last = batch[-1][1] if batch else 0
        for name, n, h, width in (("q", M, last, D), ("k", N, last // group if group > 1 else last, D), ("v", N, last // group if group > 1 else last, E)):
            load(name, *own(h), n, width)
    w.line("M, N = q.shape[-2], k.shape[-2]")
    if N == 1:  # weights of 1: einsum does not even make a product of it
        w.turns.append("one key")
    if group > 1:
        for t, width in (("k", D), ("v", E)):
            w.line(f"{t} = " + w.pick(
                f"{t}.repeat_interleave({group}, dim=1)", f"{t}[:, :, None].expand({B}, {heads}, {group}, N, {width}).reshape({B}, {H}, N, {width})",
                f"{t}.unsqueeze(2).repeat(1, 1, {group}, 1, 1).flatten(1, 2)"))
        if w.turn("heads repeated in another order", 0.3) and heads > 1:
            w.turns.clear()
            w.line(f"v = v.unflatten(1, ({heads}, {group})).transpose(1, 2).flatten(1, 2)")
    return "q", "k", "v", f, E


def _scores(w: Writer, q: str, k: str, f: Frame, flat: bool) -> str:
    root = w.pick("q.shape[-1] ** -0.5", "1.0 / math.sqrt(q.shape[-1])", "0.5")
    where = w.pick("q", "k", "scores", "scores", "scores /", "none", "in place", "both")
    if where == "q":
        w.line(f"q = {w.pick(f'q * ({root})', f'({root}) * q', f'q / (1 / ({root}))')}")
    elif where == "k":
        w.line(f"k = k * ({root})")
    elif where == "both":
        w.line(f"q, k = q * ({root}) ** 0.5, k * ({root}) ** 0.5")
    if flat:
        w.line("q, k = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:])")
    rank = 1 if flat else f.rank
    letters = "".join(w.r.sample(string.ascii_lowercase, rank + 3))
    b, i, j, d = letters[:rank], *letters[rank:]
    ways = ["q @ k.transpose(-1, -2)", "torch.matmul(q, k.mT)", "q.matmul(k.transpose(-2, -1))", f'torch.einsum("{b}{i}{d},{b}{j}{d}->{b}{i}{j}", q, k)',
            f'torch.einsum("{b}{j}{d},{b}{i}{d}->{b}{i}{j}", k, q)', "(k @ q.mT).mT", "(q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)"]
    if rank:
        ways.append(f'torch.einsum("...{i}{d},...{j}{d}->...{i}{j}", q, k)')
    if rank == 1:
        ways += ["torch.bmm(q, k.transpose(1, 2))", "torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0, alpha=0.5)"]
    s = w.let("s", w.pick(*ways))
    if w.turn("keys of the wrong order") and w.head == f.N:
        w.lines[-1] = f"{s} = q @ k"
    elif w.turns == ["keys of the wrong order"]:
        w.turns.clear()
    if where == "scores":
        s = w.let("s", w.pick(f"{s} * ({root})", f"({root}) * {s}", f"{s}.mul({root})", f"{s} * torch.tensor(0.5, dtype={s}.dtype)"))
    elif where == "scores /":
        s = w.let("s", w.pick(f"{s} / 2.0", f"{s}.div(math.sqrt(3.0))"))
    elif where == "in place":
        w.line(w.pick(f"{s} *= 0.5", f"{s}.mul_({root})", f"{s}.div_(2.0)", f"{s} /= 1.5"))
    return s


# ---------------------------------------------------------------------------------------------------- softmax and the second product

def _weigh(w: Writer, s: str, v: str, f: Frame, flat: bool, E: int) -> str:
    if flat:
        w.line("v = v.reshape(-1, *v.shape[-2:])")
    if f.M > 1 and w.turn("softmax over the queries"):
        p = w.let("p", f"{s}.softmax(-2)")
    elif w.chance(0.12):
        e = w.let("e", f"torch.exp({s} - {s}.amax(-1, keepdim=True))")
        if w.chance(0.3):
            w.line(f"{e} = {e} * ({f'torch.ones(M, N, dtype={e}.dtype).tril()' if w.chance(0.5) else w.condition('kept', f.N)})")
        if w.chance(0.3):
            e = w.let("e", f"F.dropout({e}, 0.0)")
        return w.let("out", w.pick(f"({e} @ v) / {e}.sum(-1, keepdim=True)", f"torch.matmul({e}, v) / {e}.sum(-1)[..., None]",
                                   f"torch.matmul({e}, v).div({e}.sum(dim=-1, keepdim=True))"))
    else:
        p = w.let("p", w.pick(
            f"F.softmax({s}, dim=-1)", f"{s}.softmax(-1)", f"torch.softmax({s}, {s}.dim() - 1)", f"nn.Softmax(dim=-1)({s})",
            f"F.softmax({s}, dim=-1, dtype=torch.float32).to({s}.dtype)", f"{s}.float().softmax(-1).type_as({s})",
            f"F.log_softmax({s}, -1).exp()", f"({s} - {s}.amax(-1, keepdim=True)).softmax(-1)", f"{s}.mT.softmax(-2).mT",
            f"torch.exp({s} - torch.logsumexp({s}, -1, keepdim=True))", "WRITTEN"))
        if w.lines[-1].endswith("WRITTEN"):
            w.lines.pop()
            shift = w.pick(f"{s} - {s}.amax(-1, keepdim=True)", f"{s} - {s}.max(-1, keepdim=True).values", s)
            e = w.let("e", f"({shift}).exp()")
            p = w.let("p", f"{e} / {e}.sum({w.pick('-1', 'dim=-1')}, keepdim=True)")
    for name, text in (
            ("one minus", f"1 - {p}"), ("weights squared", f"{p} * {p}"), ("second softmax", f"{p}.softmax(-1)"),
            ("weights detached", f"{p}.detach()"), ("weights masked", f"{p} * ({p} > 0.1)"), ("weights rolled", f"{p}.roll(1, -1)"),
            ("weights plus", f"{p} + 0.1"), ("weights cut", f"{p}.triu()"), ("weights rounded", f"{p}.round(decimals=1)")):
        if w.turn(name, 0.06):
            p = w.let("p", text)
    p = _changed(w, p, s, f, flat)
    for _ in range(w.pick(0, 0, 1, 2)):
        p = w.let("p", w.pick(f"F.dropout({p}, 0.0)", f"F.dropout({p}, 0.3, training=False)", f"nn.Dropout(0.2).eval()({p})", f"{p}.to(v.dtype)",
                              f"{p}.float().to(v.dtype)", f"{p}.contiguous()", f"{p}.clone()"))
    if w.chance(0.08):  # queries blanked
        seen = w.condition("seen", f.M)
        p = w.let("p", w.pick(f"{p}.masked_fill(~{seen}[:, None], 0.0)", f"torch.where({seen}[:, None], {p}, 0.0)"))
        if any("visible" in text for text in w.lines):
            w.turns.append("queries blanked that a mask may leave NaN")
    rank = 1 if flat else f.rank
    letters = "".join(w.r.sample(string.ascii_lowercase, rank + 3))
    b, i, j, d = letters[:rank], *letters[rank:]
    if f.M == f.N and w.turn("weights transposed"):
        p = w.let("p", f"{p}.mT")
    ways = [f"{p} @ v", f"torch.matmul({p}, v)", f"{p}.matmul(v)", f'torch.einsum("{b}{i}{j},{b}{j}{d}->{b}{i}{d}", {p}, v)',
            f'torch.einsum("{b}{j}{d},{b}{i}{j}->{b}{i}{d}", v, {p})', f"(v.mT @ {p}.mT).mT", f"({p}.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)"]
    if rank == 1 and not any(" < lengths" in text or "[:, None, None" in text for text in w.lines):
        ways.append(f"torch.bmm({p}, v)")
    out = w.let("out", w.pick(*ways))
    if w.turn("weights returned"):
        w.line(f"leaked = {p}")
    elif w.turn("weights read"):
        w.line(f"leaked = ({p} * {p}).sum()")
    elif w.chance(0.05):
        w.line(f"leaked = {p} @ (v * 2)")
    return out


def _changed(w: Writer, p: str, s: str, f: Frame, flat: bool) -> str:
    """Weights scaled, masked and normalised again, or less those of a second softmax: attention still."""
    if not w.chance(0.15) or f.M == 1 and "mT" in p:
        return p
    options = [lambda: f"{p} * 0.5", lambda: f"{p} / 1.25", lambda: f"{p} * {w.tensor('gate')}", lambda: f"-{p}",
               lambda: f"{p} * {w.tensor('of_keys', f.N)}", lambda: f"{p} * {w.tensor('of_rows', f.M, 1)}",
               lambda: f"{p} - {w.tensor('lam')} * ({s} * 0.5).softmax(-1)", lambda: f"{p} + ({s} * 2.0).softmax(-1)", None, None]
    if not flat and f.rank > 1:
        options.append(lambda: f"{p} * {w.tensor('gates', f.sizes[-1], 1, 1)}.sigmoid()")
    if (text := w.pick(*options)) is not None:
        return w.let("p", text())
    m = w.pick(lambda: f"torch.ones(M, N, dtype={p}.dtype).tril()", lambda: w.condition("kept", f.N),
               lambda: "(torch.arange(N) <= torch.arange(M)[:, None])")()
    t = w.let("t", w.pick(f"{p} * {m}", f"{p} * ({m} != 0).to({p}.dtype)", f"{p}.masked_fill(({m}) == 0, 0.0)"))
    return w.let("p", f"{t} / {t}.sum(-1, keepdim=True)")


def _finish(w: Writer, out: str, f: Frame, layout: str) -> None:
    if layout == "flat":
        out = w.let("out", f"{out}.view({', '.join(map(str, f.sizes))}, M, -1)")
    if w.chance(0.1):
        w.line(w.pick(f"{out} = {out} * 1.5", f"{out}.mul_(0.5)", f"{out} += 1"))
    if f.rank == 2 and w.chance(0.6):
        out = w.let("out", w.pick(f"{out}.transpose(1, 2).reshape({f.sizes[0]}, M, -1)", f"{out}.permute(0, 2, 1, 3).contiguous().flatten(2)",
                                  f"{out}.transpose(1, 2)"))
    leaked = any(text.startswith("leaked") for text in w.lines)
    w.line(f"return {out}" + (", leaked" if leaked else ""))
