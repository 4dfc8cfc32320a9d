"""`options={"dump": folder}`: what one compilation did, as files."""
from __future__ import annotations

import itertools
import logging
from pathlib import Path

import torch
from torch import fx

from .codegen.gpu import current
from .errors import FlashFXError, PlanError
from .report import Report, SiteReport
from .region import Region

log = logging.getLogger(__name__)


def dump(folder: Path, before: str, gm: fx.GraphModule, regions: list[Region], process: int) -> Path:
    """Write before.py, after.py, report.txt, report.json, report.html (with pygments installed) and one runnable kernel file per distinct fused site.

    Returns the new folder below `folder`, named by process and number, so that ranks and recompiles do not collide.
    """
    for number in itertools.count():
        target = folder / f"graph_{process}_{number}"
        try:
            target.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    gpu = current()
    report = Report(tuple(SiteReport(r, gpu, True) for r in regions), 1, gpu, torch.cuda.is_available(), True)
    (target / "before.py").write_text(before)
    (target / "after.py").write_text(gm.print_readable(print_output=False))
    (target / "report.txt").write_text(f"{report}\n")
    (target / "report.json").write_text(report.to_json() + "\n")
    try:
        report.to_html(target / "report.html")
    except FlashFXError as error:
        log.info("no report.html: %s", error)
    written: set[str] = set()
    for number, site in enumerate(report):
        if not site.fused:
            continue
        try:
            if site.kernel not in written:
                site.repro(target / f"kernel_{number}.py")
                written.add(site.kernel)
        except PlanError as error:
            log.warning("no kernel for %s: %s", site.region.site, error)
    log.info("dumped to %s", target)
    return target
