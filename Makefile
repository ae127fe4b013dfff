# Everything a contributor runs. `make help` lists the targets.
PYTHON ?= python3
# Where `make gpu` writes its rows.
OUT ?= benchmarks/results
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per worker: xdist already uses the cores, and results do not depend on the machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format types check bench gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## create .venv and install the project with all extras

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e ".[test,bench,hf]"
	touch $@

demo: setup  ## train a small MoE model with and without memfine
	$(BIN)/memfine demo

test: setup  ## the fast tests
	$(PYTEST) -m "not slow and not cuda"

test-slow: setup  ## the slow tests
	$(PYTEST) -m "slow and not cuda"

lint: setup  ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy --strict on the package (never on ".")
	$(BIN)/mypy --strict memfine_fx

check: lint types test  ## what a change must pass

bench: setup  ## the CPU benchmark suites
	$(BIN)/python -m benchmarks run --suite layer
	$(BIN)/python -m benchmarks run --suite model

gpu:  ## the GPU suite, with the Python at hand: no setup, no venv
	PYTHONPATH=. $(PYTHON) -m benchmarks run --suite gpu --json "$(OUT)/gpu.json"

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
