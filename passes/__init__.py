"""graph -> Regions -> graph. Imports no triton; imported as `flashfx.passes` only."""
if __name__ != "flashfx.passes":
    raise ImportError(f"import flashfx.passes, not {__name__}: two copies of a module disagree on types")
