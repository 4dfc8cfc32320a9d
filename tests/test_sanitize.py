"""What `tests.gpu.sanitize` makes of compute-sanitizer's reports."""
from __future__ import annotations

import pytest

from .gpu.hazards import counts, hazards, owners, partitions, within
from .gpu.sanitize import CLEAN, verdict

SOURCE = """\
def tell(numbers):
    numbers.store(1)
def attend(ring):
    ring.load()
    ring.store(2)
def load_tiles(ring):
    ring.store(0)
    ring.load()
def attention_forward(Q):
    ring = gl.allocate_shared_memory()
    gl.warp_specialize([
        (attend, (ring, 0)),
        (attend, (ring, 1)),
        (load_tiles, (ring,
                      number)),
    ], [4, 1], [232, 40])
"""


def report(*pairs: tuple[int, int]) -> str:
    at = lambda what, line: f"{what} access at attention_forward+0x{line:x}0 in attention_0a.py:{line}"
    lines = [text for a, b in pairs for text in (f"Error: Race reported between {at('Write', a)}", f"    and {at('Read', b)} [768 hazards]", "")]
    return "\n".join("========= " + text for text in [*lines, f"RACECHECK SUMMARY: {len(pairs)} hazards displayed ({len(pairs)} errors, 0 warnings)"])


def test_a_report_is_read():
    assert counts(report((7, 4))) == [1, 1, 0] and counts("========= ERROR SUMMARY: 0 errors") == [0] and counts("Killed") is None
    assert [h.lines for h in hazards(report((7, 4), (2, 8)))] == [(7, 4), (2, 8)]
    assert [owners(SOURCE)(line) for line in (1, 2, 4, 5, 7, 11)] == ["tell", "tell", "attend", "attend", "load_tiles", "attention_forward"]
    assert partitions(SOURCE) == {"attend": 2, "load_tiles": 1}


@pytest.mark.parametrize("pair, real", [((7, 4), False), ((2, 8), False), ((11, 11), False), ((5, 4), False), ((7, 8), True), ((2, 2), True)])
def test_hazards_within_a_partition_are_real(pair, real):
    assert bool(within(hazards(report(pair)), lambda file: SOURCE)) == real
    assert verdict(report((7, 4), pair), 0, "racecheck", "hopper", lambda file: SOURCE).startswith(CLEAN) != real


@pytest.mark.parametrize("text, status, tool, schedule, said", [
    ("========= ERROR SUMMARY: 0 errors", 0, "memcheck", "hopper", CLEAN), ("========= ERROR SUMMARY: 10 errors", 0, "memcheck", "hopper", "not clean"),
    ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "racecheck", "triton", CLEAN),
    ("========= RACECHECK SUMMARY: 25 hazards displayed (25 errors, 0 warnings)", 0, "racecheck", "triton", "not clean"),
    (report((7, 4)), 0, "racecheck", "triton", "not clean"), (report((7, 4)).replace("1 hazards displayed", "0 hazards displayed"), 0, "racecheck", "hopper", "not clean"),
    ("========= ERROR SUMMARY: 0 errors", 1, "memcheck", "hopper", "failed"), ("", 0, "racecheck", "hopper", "failed"), ("", 0, "", "hopper", CLEAN)])
def test_verdicts(text, status, tool, schedule, said):
    assert verdict(text, status, tool, schedule, lambda file: SOURCE) == said
