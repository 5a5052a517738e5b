# `make demo` and `make test` need nothing but Python 3.11, git and a package index: both set up .venv first.
# `make test PYTHON=python3.12` does the same with the second stack, a newer Megatron-Core and torch, in .venv-3.12.

# The path of an interpreter: on PATH, or the newest one that pyenv keeps (its commands on PATH answer only when chosen).
interpreter = $(shell $(1) -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls "$$(pyenv root 2>/dev/null)"/versions/*/bin/$(1) 2>/dev/null | sort -V | tail -n 1)

PYTHON ?= $(or $(call interpreter,python3.11),$(call interpreter,python3))
INTERPRETER := $(call interpreter,$(PYTHON))
ifeq ($(INTERPRETER),)
$(error no $(or $(PYTHON),python3.11): it is neither on PATH nor in pyenv)
endif
VERSION := $(shell $(INTERPRETER) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(filter 3.11 3.12,$(VERSION)),)
$(error megagspo needs Python 3.11 or 3.12, and $(INTERPRETER) is $(VERSION): add PYTHON=python3.11)
endif
STACK := $(if $(filter 3.12,$(VERSION)),-3.12)
VENV := .venv$(STACK)
LOCK := requirements$(STACK).lock
BIN := $(VENV)/bin
# One OpenMP thread a process: tests and ranks run side by side, and busy threads on a shared core slow each other down.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo lint test-quick test test-stack test-second-stack test-full test-full-only clean

setup: $(VENV)/installed

$(VENV)/installed: $(LOCK) pyproject.toml
	$(INTERPRETER) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement $(LOCK)
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

test-stack: setup  ## what has to hold on both stacks: unit tests, gloo ranks, engines
	$(BIN)/pytest tests/unit tests/dist tests/contract -m "not full"

test-second-stack:  ## test-stack on Python 3.12, where there is one
	@second="$(call interpreter,python3.12)"; \
	if [ -n "$$second" ]; then exec $(MAKE) test-stack PYTHON="$$second"; fi; \
	case ",$$REQUIRE," in *,python3.12,*) \
		echo "error: no python3.12 on PATH or in pyenv, and REQUIRE lists it" >&2; exit 1;; esac; \
	echo "skipped: the second stack needs python3.12, which is neither on PATH nor in pyenv"

test-full: test test-full-only

test-full-only: setup test-second-stack  ## the second stack, and what takes long: objectives x layouts, the demo for three seeds
	$(BIN)/pytest -m full

clean:
	rm -rf .venv .venv-3.12 .mypy_cache .ruff_cache .pytest_cache
