"""A report in a terminal, by `rich`: the text of `str(report)`, with what matters set off."""
from __future__ import annotations

import re

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from .report import Report, SiteReport

_LABEL = re.compile(r"^(\s*)(given|sizes|qk|score|where|empty|drop|out|sink|shape|tiles|plan|memory|time|clock|backward|matched|hint:|at)(?=\s)")


def rendered(report: Report) -> Group:
    """One panel for each group of equal sites, under the summary."""
    parts: list = [Text(report.head, style="bold")]
    parts += [Text(line, style="dim") for line in (report.about, report.note, report.clock) if line]
    for group in report.groups():
        site = group.site
        title = Text.assemble((f"{group.label} ", "bold"), ("fused" if site.fused else "left alone", "bold green" if site.fused else "bold yellow"),
                              f": {site.region.site}")
        parts.append(Panel(Group(*_lines(site)), title=title, title_align="left", border_style="green" if site.fused else "yellow"))
    return Group(*parts)


def _lines(site: SiteReport) -> list[Text]:
    source = [f"at {site.region.source}"] if site.fused and site.region.source else []
    return [_styled(line) for line in (*source, *site.lines())]


def _styled(line: str) -> Text:
    text = Text(line)
    if label := _LABEL.match(line):
        text.stylize("cyan", *label.span(2))
    if line.strip().startswith(("at ", "hint:")):
        text.stylize("dim" if "at " in line[:8] else "green")
    text.highlight_regex(r"\d+(\.\d+)?x (less|faster)", "bold green")
    return text
