"""Errors a user can meet. A site that is left alone is no error: it is a `Refusal` (see `flashfx.region`)."""


class FlashFXError(Exception):
    """Base class of every error FlashFX raises on purpose."""


class OptionError(FlashFXError, ValueError):
    """An option of `torch.compile(..., backend="flashfx", options=...)` is unknown or has a wrong value."""


class SpecError(FlashFXError, ValueError):
    """A spec text does not parse, or a spec contradicts itself."""


class PlanError(FlashFXError, RuntimeError):
    """No schedule can run this spec on this device; names the limit and the way out."""


class VerifyError(FlashFXError, AssertionError):
    """A rewritten site computes something else than the original graph."""


class FlashFXWarning(UserWarning):
    """FlashFX was asked for and does nothing, for a reason that the user can act on. Given once for each reason."""
