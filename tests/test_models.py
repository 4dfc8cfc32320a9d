"""Unmodified `transformers` models: every site fused, outputs, loss and all gradients within the budget of eager."""
from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

from .thinning import thinned
from .zoo import entries
from .zoo.measure import Compiled, compare, dropped_out, run, worst

NAMES = ("gpt2", "bert", "llama", "t5", "mistral", "bloom", "gemma2", "speech_to_text", "vit")
WHOLE = ("gpt2",)
"""Models that the default run tries in every way; the others by eager training or SDPA inference in turn, the rest of the product is marked slow."""
SITES = {"t5": 6, "speech_to_text": 6}  # two layers of self attention each, and cross attention in decoders


def entry(name):
    found, = entries([name])
    return found


def unpadded(name):
    def inputs(cfg, g):
        kwargs = entry(name).inputs(cfg, g)
        return {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs

    return dataclasses.replace(entry(name), inputs=inputs)


def offered(e, attn):
    try:
        e.build(attn=attn)
    except ValueError as error:
        assert "does not support" in str(error)
        pytest.skip(f"transformers offers no {attn} attention for {e.name}")


def check(e, *, train=False, **options):
    backend, *results = compare(e, train=train, **options)
    sites = SITES.get(e.name, 2)
    assert [str(r) for r in backend.refusals] == []
    assert backend.before == backend.fused, "sites are counted in the Dynamo graphs, without our finder"
    assert backend.matrices == [], "masks are derived: no tensor with an element for every query and key is made for them"
    # layerdrop breaks the graph in every layer, and layers share what is compiled
    assert backend.before == sites or train and e.name == "speech_to_text" and 3 <= backend.before <= sites
    over, where = worst(*results)
    assert over <= 1.0, f"{where} is over the budget by {over:.3g} rounding bands"
    assert "loss" in results[1] and sum(n.startswith("gradient") for n in results[1]) > 10


def _tried(name, *how, slow):
    return pytest.param(name, *how, id="-".join([name, *(("train" if h else "eval") if isinstance(h, bool) else h for h in how)]),
                        marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("name, attn, train", [_tried(name, attn, train, slow=name not in WHOLE and not train == (attn == "eager") == (n % 2 == 0))
                                               for n, name in enumerate(NAMES) for attn in ("eager", "sdpa") for train in (False, True)])
def test_every_site_is_fused_and_right(name, attn, train):
    e = entry(name)
    offered(e, attn)
    check(e, train=train, attn=attn, inner="aot_eager")


@pytest.mark.parametrize("attn", thinned(("eager", "sdpa")))
def test_llama_without_padding(attn):
    check(unpadded("llama"), attn=attn, inner="aot_eager")


@pytest.mark.parametrize("name", thinned(("gpt2", "llama"), 2))
def test_with_inductor(name):
    check(entry(name), inner="inductor")


@pytest.mark.parametrize("name, attn", [_tried(name, attn, slow=n % 2 > 0 or (attn == "sdpa") == (n % 4 > 0))
                                        for n, name in enumerate(NAMES) for attn in ("eager", "sdpa")])
def test_dropout_is_finite_and_follows_the_seed(name, attn):
    e = entry(name)
    offered(e, attn)
    backend, first, second = dropped_out(e, attn=attn, inner="eager")
    assert backend.fused == backend.before > 0
    assert "loss" in first
    for n, t in first.items():
        assert t.isfinite().all(), n
        assert torch.equal(t, second[n]), n


@pytest.mark.parametrize("name", thinned(("bert", "llama", "xlm", "t5", "vit"), 2))
def test_dynamic_shapes(name):
    check(entry(name), dynamic=True, inner="eager")


@pytest.mark.parametrize("name", ("gpt2", "llama"))
def test_one_graph_serves_other_lengths(name):
    model, kwargs = entry(name).build(dropout=0.0)
    model.requires_grad_(False)
    for t in kwargs.values():
        torch._dynamo.mark_dynamic(t, 1)
    torch._dynamo.reset()
    backend = Compiled("eager")
    compiled = torch.compile(model, backend=backend)
    for length in (24, 17, 11):
        cut = kwargs if length == 24 else {n: t[:, :length].clone() for n, t in kwargs.items()}
        expected, got = run(model, model, cut, backward=False), run(model, compiled, cut, backward=False)
        exact = run(copy.deepcopy(model).double(), copy.deepcopy(model).double(), cut, backward=False)
        assert worst(got, expected, exact, [expected])[0] <= 1.0
    assert (backend.before, backend.fused) == (2, 2), "compiled once"


@pytest.mark.parametrize("name, static", thinned((("gpt2", False), ("gpt2", True), ("llama", False), ("llama", True)), 3))
def test_generation(name, static):
    """A prompt padded at the left, then token by token: compiled in place, whose cache grows, or by `generate` itself, with a static cache."""
    e = entry(name)
    model = AutoModelForCausalLM.from_config(e.config(0.0), attn_implementation="eager").eval()
    kwargs = e.inputs(model.config, torch.Generator().manual_seed(0))
    mask = torch.ones_like(kwargs["input_ids"])
    mask[0, :5] = 0
    given = dict(input_ids=kwargs["input_ids"], attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model.generate(**given)
    torch._dynamo.reset()
    backend, named = Compiled("eager"), {}
    if static:
        config = CompileConfig(backend=lambda *graph: backend(*graph), mode=None)  # is copied: a function stays itself
        config._compile_all_devices = True  # not GPUs alone
        named = {"cache_implementation": "static", "compile_config": config}
    else:
        model.compile(backend=backend)
    assert torch.equal(model.generate(**given, **named), expected)
    assert [str(r) for r in backend.refusals] == []
    assert backend.fused == backend.before >= 2


@pytest.mark.parametrize("name, reentrant", thinned((("gpt2", False), ("gpt2", True), ("llama", False), ("llama", True)), 3))
def test_gradient_checkpointing(name, reentrant):
    model, kwargs = entry(name).build(train=True, dropout=0.0)
    eager_model = copy.deepcopy(model)
    eager = run(eager_model, eager_model, kwargs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch._dynamo.reset()
    backend = Compiled("aot_eager")
    got = run(model, torch.compile(model, backend=backend), kwargs)
    exact_model = copy.deepcopy(eager_model).double()
    exact_model.zero_grad()
    exact = run(exact_model, exact_model, kwargs)
    assert [str(r) for r in backend.refusals] == []
    assert backend.fused == backend.before and sum(r.fused for r in backend.regions) >= 2
    over, where = worst(got, eager, exact, [eager])
    assert over <= 1.0, f"{where} is over the budget by {over:.3g} rounding bands"


@pytest.mark.parametrize("name, attn", thinned((("gpt2", "eager"), ("gpt2", "sdpa"), ("bert", "eager"), ("bert", "sdpa")), 3))
def test_autocast(name, attn):
    """bfloat16: eager under autocast against eager in float64 says how large the errors are."""
    model, kwargs = entry(name).build(attn=attn, dropout=0.0)

    def cast(call):
        def under(**kw):
            with torch.autocast("cpu", torch.bfloat16):
                return call(**kw)
        return under

    copies = [copy.deepcopy(model) for _ in range(2)]
    torch._dynamo.reset()
    backend = Compiled("aot_eager")
    got = run(model, cast(torch.compile(model, backend=backend)), kwargs)
    eager = run(copies[0], cast(copies[0]), kwargs)
    exact = run(copies[1].double(), copies[1], kwargs)
    assert (backend.before, backend.fused) == (2, 2)
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in eager.items()}
    for n, t in eager.items():  # every tensor passed through bfloat16, whatever its dtype
        allowed = 2 * (t.double() - exact[n].double()).abs().max() + torch.finfo(torch.bfloat16).eps * max(e.abs().max() for e in exact.values())
        assert (got[n].double() - exact[n].double()).abs().max() <= allowed, n
