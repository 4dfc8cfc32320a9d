"""What compute-sanitizer's racecheck reports of warp-specialised kernels, told apart.

It follows barriers that all of a block's threads, or of some warps, wait at. An mbarrier at which one warp arrives and others wait it does not follow: of a ring in shared
memory that is right by construction it reports that the reader races with the writer, and of Triton's own hand-over to partitions that it races with itself
(`tests/gpu/ring.py`; compute-sanitizer 2025.3). So hazards between partitions say nothing; within one there must be none.
"""
from __future__ import annotations

import re
from collections import Counter
from typing import Callable, NamedTuple

ACCESS = re.compile(r"(?P<what>Read|Write) access at (?P<kernel>\w+)\+0x[0-9a-f]+ in (?P<file>[\w.]+):(?P<line>\d+)")


class Hazard(NamedTuple):
    """Two accesses to a place in shared memory that nothing orders for all that racecheck knows."""

    kernel: str
    file: str
    lines: tuple[int, int]


def counts(report: str) -> list[int] | None:
    """The numbers of the tool's summaries, of errors, hazards and warnings; None if it never came to one."""
    summaries = [line for line in report.splitlines() if "SUMMARY:" in line]
    return [int(n) for line in summaries for n in re.findall(r"\d+", line.split("SUMMARY:")[1])] or None


def hazards(report: str) -> list[Hazard]:
    """Each pair that a report of racecheck names."""
    found, first = [], None
    for line in report.splitlines():
        if access := ACCESS.search(line):
            if "Race reported between" in line:
                first = access
            elif first is not None:
                found.append(Hazard(first["kernel"], first["file"], (int(first["line"]), int(access["line"]))))
    return found


def owners(source: str) -> Callable[[int], str]:
    """Line of a generated file -> the function that it is in."""
    starts = [(n, m[1]) for n, line in enumerate(source.splitlines(), 1) if (m := re.match(r"def (\w+)\(", line))]
    return lambda line: next((name for n, name in reversed(starts) if n <= line), "")


def partitions(source: str) -> Counter:
    """The functions that warps of a kernel run, and how often."""
    listed = "".join(re.findall(r"gl\.warp_specialize\(\[(.*?)\], \[", source, re.S))
    return Counter(re.findall(r"\((\w+), \(", listed))


def within(found: list[Hazard], source_of: Callable[[str], str]) -> list[str]:
    """Of some hazards those that an mbarrier does not explain: of one partition that one group of warps runs. source_of: text of a generated file."""
    told = []
    for kernel, file, lines in found:
        source = source_of(file)
        owner, runs = owners(source), partitions(source)
        first, second = map(owner, lines)
        if first == second and first != kernel and runs[first] < 2:
            told.append(f"{kernel}, {file}: lines {lines[0]} and {lines[1]} of {first}")
    return told
