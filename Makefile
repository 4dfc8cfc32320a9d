# Set-up and everyday commands. Each makes .venv if there is none, so that a fresh checkout needs nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# a process for each core, four at most: they take some 3 GiB each
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist worksteal
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_OPTIONS)

.PHONY: quickstart test test-slow clean

quickstart: $(VENV)/.ready
	$(BIN)/python examples/01_quickstart.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

# torch first: an unpinned torch, pulled in by another package, would be the newest CUDA build
$(VENV)/.ready: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
