"""spec -> plan -> source -> launch. Imports no torch.fx; imported as `flashfx.codegen` only."""
if __name__ != "flashfx.codegen":
    raise ImportError(f"import flashfx.codegen, not {__name__}: two copies of a module disagree on types")
