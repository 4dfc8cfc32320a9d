"""The page of a report: complete, escaped, small, and alive in a real browser."""
from __future__ import annotations

import json
import shutil

import pytest
import torch

import flashfx
from flashfx.page.mathml import formulas
from flashfx.spec import AttentionSpec

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def causal(q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.125
    at = torch.arange(q.shape[-2])
    return scores.masked_fill(at > at[:, None], float("-inf")).softmax(-1) @ v


def several(q, k, v, doc):
    first = causal(causal(q, k, v), k, v)
    hidden = doc[:, None, :, None] != doc[:, None, None, :]
    second = (first @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    scores = second @ k.transpose(-1, -2)
    least = scores.topk(4).values[..., -1:]  # <script>alert("not run")</script>
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v  # <b>&amp;</b>


@pytest.fixture(scope="module")
def report():
    q, k, v = (torch.zeros(2, 3, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return flashfx.explain(several, q, k, v, torch.zeros(2, 1024, dtype=torch.long), gpu="A100")


def test_equal_sites_are_gathered(report):
    assert [(g.label, g.site.fused) for g in report.groups()] == [("[0, 1]", True), ("[2]", True), ("[3]", False)]


def test_the_page_says_everything_once(report, tmp_path):
    text = report.to_html(tmp_path / "sub" / "page.html")
    assert (tmp_path / "sub" / "page.html").read_text(encoding="utf-8") == text and len(text) < 3e6
    for part in ("2 sites, one spec", "the mask depends on the scores", "a mask must be known before the scores", "lower bound", "attention_backward_keys",
                 "the node in red stopped the match", "runner-up", "Save kernel_0.py", "report[0].repro", 'data-m="64" data-n="64"', "test_page.py"):
        assert part in text, part
    assert text.count('<article class="site"') == 3 and text.count('<svg class="mask"') == 2 and text.count('<svg class="graph"') == 5


def test_the_users_text_is_escaped_and_nothing_is_loaded(report):
    text = report.to_html()
    assert "<script>alert" not in text and "&lt;b&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text


def test_the_record_is_complete(report):
    found = json.loads(report.to_json())
    assert (found["fused"], found["groups"], found["gpu"], found["training"]) == (3, [[0, 1], [2], [3]], "A100", True)
    fused, refused = found["sites"][0], found["sites"][3]
    assert AttentionSpec.parse(fused["spec"]) == report[0].spec and found["kernels"][fused["kernel"]] == report[0].kernel
    assert fused["forward"]["plan"]["BLOCK_M"] == report[0].plan.BLOCK_M and fused["backward"]["bytes"]["least"] <= fused["backward"]["bytes"]["after"]
    assert fused["forward"]["choices"][0]["verdict"] == "chosen" and 0 < fused["forward"]["seconds"] < 1
    assert [k["kernel"] for k in fused["backward"]["kernels"]] == ["delta", "rows", "keys"] and "device memory" in fused["forward"]["resources"]
    assert refused["refusal"]["node"] in [n["name"] for n in refused["before"]] and refused["reached"] and not refused["after"]
    assert {n["role"] for n in fused["before"]} >= {"q", "k", "v", "scores", "softmax", "output", "mask"}
    assert any(n["op"] == "flashfx.attention" and n["role"] == "new" for n in fused["after"])


def test_notebooks_and_terminals_get_the_same_sites(report):
    from rich.console import Console
    console = Console(width=200, record=True, force_terminal=True, file=open("/dev/null", "w"))
    console.print(report)
    shown = console.export_text()
    for part in ("4 attention sites, 3 fused, 1 left alone", "where   j <= i", "the mask depends on the scores"):
        assert part in shown and part in str(report)
    html = report._repr_html_()
    assert "<script" not in html and "the mask depends on the scores" in html and len(html) < 3e5


def test_mathematics_is_drawn():
    spec = AttentionSpec.parse("attention[b, i, j]\n given bias: float[2]\n qk = q[b, i] . k[j]\n score = tanh(qk / 3.0) * 2.0 + bias[i, j // 64]\n"
                               " where (j <= i) & (~((i == 3) | (j == 5)) | (abs(i - j) < 4))\n empty zero\n drop 0.1\n out = softmax_j(score) . v[b, j]")
    drawn = dict(formulas(spec))
    assert list(drawn) == ["score", "visible where", "and", "weight", "output"]
    assert "<mfrac>" in drawn["score"] and "tanh" in drawn["score"] and "⌊" in drawn["score"]
    assert drawn["visible where"].count("≤") == 1 and "¬" in drawn["and"] and "∨" in drawn["and"] and "dropout" in drawn["output"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(report, tmp_path, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    report.to_html(tmp_path / "page.html")
    said: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(color_scheme=scheme, offline=True, viewport={"width": 1280, "height": 900})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        theme = lambda: page.evaluate("document.documentElement.dataset.theme")
        background = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
        first = background()
        assert theme() == scheme
        page.click("#theme")
        assert theme() != scheme and background() != first

        opened = lambda: page.evaluate("[...document.querySelectorAll('details')].filter(d => d.open).length")
        few = opened()
        page.click("text=Open all")
        assert opened() > few and page.locator("text=Close all").count() == 1

        kernel = page.locator(".kernel").first
        kernel.locator("[role=tab]", has_text="attention_backward_keys").click()
        assert kernel.locator(".code:visible").count() == 1 and "dk" in kernel.locator(".code:visible").inner_text()
        kernel.locator("[role=tab]", has_text="whole file").click()
        assert kernel.locator(".code:visible").count() > 5
        kernel.locator(".roles [data-role=scores]").hover()
        assert kernel.locator(".l[data-role=scores].on").count() > 0

        mask = page.locator("svg.mask").first
        box = mask.bounding_box()
        mask.hover(position={"x": box["width"] - 3, "y": 3})
        assert page.locator(".tip").inner_text().split("\n") == ["queries 0 … 63", "keys    960 … 1023", "skipped: no query sees a key"]

        scene = page.locator(".viewport .scene").first
        before = scene.get_attribute("transform")
        page.locator(".viewport [data-zoom='1.4']").first.click()
        assert scene.get_attribute("transform") != before
        page.locator(".repro button").first.click()
        page.wait_for_function("document.querySelector('.repro button').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == page.locator(".repro pre").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        browser.close()
    assert said == []
