"""A report as one HTML page that opens offline: templates filled with what `flashfx.page.view` reads from the report."""
from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..report import Report

HERE = Path(__file__).parent


@functools.cache
def _templates():
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def page(report: Report) -> str:
    """The whole page. Text of the model (source lines, names) is escaped by the templates."""
    from .source import styles
    from .view import view
    return _templates().get_template("page.html").render(
        **view(report), css=(HERE / "style.css").read_text(encoding="utf-8") + styles(), script=(HERE / "page.js").read_text(encoding="utf-8"))


def notebook(report: Report) -> str:
    """A fragment without scripts for notebooks: summary, mathematics, masks, plans, refusals."""
    from .view import view
    return _templates().get_template("notebook.html").render(**view(report, sources=False), css=(HERE / "style.css").read_text(encoding="utf-8"))
