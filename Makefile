# `make demo` and `make test` need nothing but Python 3.11, git and a package index: both set up .venv first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# One OpenMP thread a process: tests and ranks run side by side, and busy threads on a shared core slow each other down.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo lint test-quick test test-full test-full-only clean

setup: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)) and "megagspo needs Python 3.11 or 3.12: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

demo: setup  ## the main job on this machine's CPU: warm-up, GSPO, evaluation, export
	$(BIN)/python tools/demo.py $(DEMO)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-quick: lint  ## lint, types, unit tests, the objectives' vectors
	$(BIN)/pytest tests/unit tests/conformance

test: lint  ## + gloo ranks, engines, commands as a user types them
	$(BIN)/pytest -m "not full"

test-full: test test-full-only

test-full-only: setup  ## what takes long: the demo for three seeds
	$(BIN)/pytest -m full

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
