"""Source on the page: the user's lines in context, and generated kernels highlighted, each block tied to the line that it comes from."""
from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from ..region import Frame, Node, Region

ROLES = ("q", "k", "v", "scores", "score", "mask", "softmax", "dropout", "output")
_WRITES = (
    # what a line of a generated kernel computes, by the names that the schedules give: the first that fits
    ("dropout", r"(keep\w* =|.*where\(keep)"),
    ("mask", r"(visible\w* =|(raw|p) = \w+\.where\(\(*[ij~m]|mask\w*_value =|(raw|p) = \w+\.where\(visible)"),
    ("scores", r"((next_)?qk\w* =)"),
    ("score", r"((raw|bias\w*_value|\w+_tile = gluon_|tanh_tile)\b.*)"),
    ("softmax", r"((p|m_new|anchor|alpha|l|lse|ds|slope|delta) =)"),
    ("output", r"((next_)?(acc|dv|dp)\w* =|weights\w* =)"),
    ("q", r"((next_)?(q|dq)\w* = .*(load|index|dot|mma|zeros|copy))"),
    ("k", r"((next_)?(k|dk)\w* = .*(load|index|dot|mma|zeros|copy))"),
    ("v", r"(v\w* = .*(load|index|dot|mma|zeros|copy))"),
)


def _need_pygments():
    try:
        import pygments  # noqa: F401
    except ModuleNotFoundError:
        from ..errors import FlashFXError
        raise FlashFXError("the page needs pygments: pip install 'flashfx[report]'") from None


def styles() -> str:
    """CSS of highlighted code, light and dark."""
    _need_pygments()
    from pygments.formatters import HtmlFormatter
    light, dark = HtmlFormatter(style="friendly"), HtmlFormatter(style="github-dark")
    keep = lambda css: "\n".join(line for line in css.splitlines() if "background" not in line and "line-height" not in line)
    return "\n" + keep(light.get_style_defs(".code")) + "\n" + keep(dark.get_style_defs('[data-theme="dark"] .code')) + "\n"


def lines(text: str) -> list[Markup]:
    """Python source as highlighted HTML, a piece for each line."""
    _need_pygments()
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    html = highlight(text, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
    found, open_ = [], ""
    for line in html.split("\n"):  # a string over several lines is one span
        whole = open_ + line
        opened, closed = re.findall(r"<span[^>]*>", whole), whole.count("</span>")
        open_ = "".join(opened[len(opened) - (len(opened) - closed):]) if len(opened) > closed else ""
        found.append(Markup(whole + "</span>" * max(0, len(opened) - closed)))
    return found


@dataclass(frozen=True)
class Line:
    number: int
    html: Markup
    role: str = ""
    here: bool = False


def context(frame: Frame, around: int = 4) -> list[Line]:
    """The lines around a frame's, or that line alone if the file is not here."""
    path = _path(frame.file)
    if path is None:
        return [Line(frame.line, lines(frame.code)[0], here=True)] if frame.code else []
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = max(0, frame.line - 1 - around)
    picked = text[first: frame.line + around]
    margin = min((len(t) - len(t.lstrip()) for t in picked if t.strip()), default=0)
    return [Line(first + n + 1, html, here=first + n + 1 == frame.line) for n, html in enumerate(lines("\n".join(t[margin:] for t in picked)))]


def _path(file: str) -> Path | None:
    """Frames name files from the package or the working directory on."""
    import sysconfig
    for base in (Path(), Path(sysconfig.get_paths()["purelib"])):
        if (base / file).is_file():
            return base / file
    return None


def origins(region: Region) -> dict[str, Frame]:
    """For each role, the user's line that it comes from."""
    nodes = {n.name: n for n in region.before}
    found: dict[str, Frame] = {}
    for n in region.before:  # nearest to the output first
        if n.frame is None:
            continue
        for role in n.role.split(", "):
            if role in ROLES:
                found.setdefault(role, n.frame)
        reads = {nodes[x].role for x in n.inputs if x in nodes}
        if n.role == "" and n.op != "input" and any(r == "mask" or r[:4] in ("mask", "bias") or r[:3] == "ids" for r in reads):
            found.setdefault("mask" if "mask" in found or region.spec is not None and region.spec.is_masked else "score", n.frame)
        elif n.role == "" and n.op in ("mul", "truediv", "div", "tanh", "add"):
            found.setdefault("score", n.frame)
    return found


def kernel(text: str) -> list[dict]:
    """The blocks of a generated file: its head, and each function with its highlighted lines and their roles."""
    tree, every = ast.parse(text), lines(text)
    plain = text.splitlines()
    blocks, at = [], 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            blocks.append(("head" if not blocks else "", at, first))
            blocks.append((node.name, first, node.end_lineno))
            at = node.end_lineno
    blocks.append(("check", at, len(plain)))
    made = []
    for name, first, last in blocks:
        while first < last and not plain[first].strip():
            first += 1
        if first >= last or not name:
            continue
        rows, role = [], ""
        tied = name.startswith("attention") or any("mma(" in line or "dot(" in line for line in plain[first:last])
        for n in range(first, last):
            code = plain[n].strip()
            role = next((r for r, pattern in _WRITES if re.match(pattern, code)), "") if _starts(plain, n) else role
            rows.append(Line(n + 1, every[n], role if tied else ""))
        made.append({"name": name, "lines": rows, "backward": "backward" in name or name in ("attention_delta", "accumulate")})
    return made


def _starts(plain: list[str], n: int) -> bool:
    """Does a statement start here, rather than go on?"""
    before = "\n".join(plain[max(0, n - 4): n])
    return before.count("(") <= before.count(")") or plain[n - 1].strip().endswith(":")


def short(frame: Frame) -> str:
    return str(escape(f"{Path(frame.file).name}:{frame.line}"))
