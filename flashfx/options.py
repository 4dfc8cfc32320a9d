"""Options of `torch.compile(..., backend="flashfx", options={...})`."""
from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Mapping

from .errors import OptionError

INNER = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class Options:
    """inner    what compiles the rewritten graph: "inductor" (default), "aot_eager" or "eager" (runs it as it stands)
    verify   compare every rewritten site with its original in float64 at compile time; a difference raises VerifyError
    disable  leave every site alone: plain `inner`
    dump     folder that receives, per compiled graph, the graph before and after, the report and the kernels as runnable files
    decline  leave a site alone that is predicted clearly faster as it is; False rewrites it all the same
    autotune  measure the best few plans of each site on the GPU, at its first call with new sizes; the fastest is kept on disk. Holds for the process
    """

    inner: str = "inductor"
    verify: bool = False
    disable: bool = False
    dump: str | None = None
    decline: bool = True
    autotune: bool = False

    def __post_init__(self):
        if self.inner not in INNER:
            raise OptionError(f"option inner={self.inner!r}: choose one of {', '.join(map(repr, INNER))}")
        for name in ("verify", "disable", "decline", "autotune"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name}={getattr(self, name)!r}: True or False is expected")
        if self.dump is not None and not isinstance(self.dump, str):
            raise OptionError(f"option dump={self.dump!r}: the path of a folder is expected")


def split(options: Mapping[str, Any] | None, mode: str | None) -> tuple[Options, dict[str, Any]]:
    """(our options, Inductor's config patches). `mode` is translated as `torch.compile` does. Raises OptionError."""
    from torch._inductor import config, list_mode_options
    patches: dict[str, Any] = {}
    if mode not in (None, "default"):
        try:
            patches.update(list_mode_options(mode))
        except RuntimeError as error:
            raise OptionError(str(error)) from None
    own_names = [f.name for f in fields(Options)]
    own: dict[str, Any] = {}
    known = set(config._config)
    for key, value in (options or {}).items():
        if key in own_names:
            own[key] = value
        elif key.replace("-", "_") in known:
            patches[key.replace("-", "_")] = value
        else:
            near = difflib.get_close_matches(key, [*own_names, *known], 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"unknown option {key!r}.{meant} FlashFX's options: {', '.join(own_names)}; every option of "
                              "torch._inductor.config is passed through")
    chosen = Options(**own)
    if patches and chosen.inner != "inductor":
        raise OptionError(f"inner={chosen.inner!r} does not use Inductor, so these options have no effect: {', '.join(sorted(patches))}")
    return chosen, patches
