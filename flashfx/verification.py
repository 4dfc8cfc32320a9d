"""`flashfx.verify`: is the rewritten model the model? And `options={"verify": True}`, which asks while compiling."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Iterator

from .errors import FlashFXError, VerifyError
from .region import Checked, Region


def wrong(region: Region) -> Checked | None:
    """The first comparison of a site that failed."""
    return next((c for c in region.checked if not c.good), None)


def raise_if_wrong(regions: Iterable[Region]) -> None:
    """Raises VerifyError for the first site that computes something else than its original."""
    for r in regions:
        if (c := wrong(r)) is not None:
            raise VerifyError(f"site {r.site}{' at ' + r.source if r.source else ''}: {c.what} differs from its original by {c.error:.3g}, "
                              f"at most {c.allowed:.3g} is rounding ({c.dtype}); lifted as\n{r.spec}\n"
                              "Please report this; options={'disable': True} avoids it.")


@dataclass(frozen=True)
class Verification:
    """What `verify` found: one Region for each site; prints as a table. True in a condition if nothing is wrong and every rewritten site was compared."""

    regions: tuple[Region, ...]

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)

    def __len__(self) -> int:
        return len(self.regions)

    @property
    def wrong(self) -> tuple[Region, ...]:
        """Sites that compute something else than their original."""
        return tuple(r for r in self.regions if wrong(r) is not None)

    @property
    def unchecked(self) -> tuple[Region, ...]:
        """Rewritten sites that could not be compared; `Region.unchecked` says why."""
        return tuple(r for r in self.regions if r.fused and not r.checked)

    def __bool__(self) -> bool:
        return not self.wrong and not self.unchecked

    def __str__(self) -> str:
        fused = [r for r in self.regions if r.fused]
        good = len(fused) - len(self.wrong) - len(self.unchecked)
        lines = [f"flashfx.verify: {len(fused)} rewritten site{'s' * (len(fused) != 1)}, {good} agree with their originals, {len(self.wrong)} differ, "
                 f"{len(self.unchecked)} not compared; {len(self.regions) - len(fused)} left alone"]
        for n, r in enumerate(self.regions):
            if not r.fused:
                continue
            state = "DIFFERS" if wrong(r) is not None else "ok" if r.checked else "not compared"
            lines.append(f"[{n}] {state}: {r.site}{' at ' + r.source if r.source else ''}")
            lines += [f"      {'ok     ' if c.good else 'DIFFERS'} {c.what:<24} {c.dtype:<9} error {c.error:.1e}, at most {c.allowed:.1e}" for c in r.checked]
            lines += [f"      {r.unchecked}"] * bool(r.unchecked)
        return "\n".join(lines)

    __repr__ = __str__


def verify(fn: Callable, *args, check: bool = True, **kwargs) -> Verification:
    """Compare each site of `fn(*args, **kwargs)` before and after the rewrite: outputs and all gradients, in the model's dtype and in float64.

    The call is captured as by `flashfx.explain`; each site is then run on random data of its own shapes, the original calls beside what was
    put in their place, kernels included: on a GPU if the model is there. float64 runs on the CPU and must agree to rounding; the model's
    dtype may be off by twice the original's own error against float64. Costs a few seconds for each large site. Dropout is left out.

    Raises VerifyError that names the first wrong site and its source line, unless `check` is False: then read `.wrong`. Raises FlashFXError if
    there is no site at all.
    """
    from .capture import graphs_of
    from .passes.pipeline import rewrite
    from . import op  # registers flashfx::attention
    found = graphs_of(fn, args, kwargs, lambda gm: rewrite(gm, verify=True))
    result = Verification(tuple(r for regions in found for r in regions))
    if not result.regions:
        raise FlashFXError("nothing to verify: the call contains no attention site")
    if check:
        raise_if_wrong(result.regions)
    return result
