"""`python -m flashfx bench`: FlashFX and its peers side by side, in one run, on random data."""
