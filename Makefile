# Everything a contributor runs. `make help` lists the targets.
PYTHON ?= python3
# Where `make gpu` writes its rows.
OUT ?= benchmarks/results
PIP_FLAGS ?=
# Another torch than the project's own, each in an environment of its own: make test-torch TORCH=2.15.0
TORCH ?=
PINS := $(if $(TORCH),torch==$(TORCH) $(shell grep ^transformers constraints.txt),-c constraints.txt)
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUITES := layer,adapters,model,vocab,compile,paper,paper_ep,ep,moeblaze,scaling,memory,budget,cluster
# One thread per worker: xdist already uses the cores, and results do not depend on the machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q
FAST := not slow and not campaign and not cuda and not trainers

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-torch test-slow campaign examples golden coverage coverage-packages coverage-versions docs \
    figures lint format types check bench bench-quick gpu gpu-dry gpu-kernels clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## create .venv and install the project with all extras

$(STAMP): pyproject.toml planner/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) $(PINS) -e ".[test,hf]" -e planner
	touch $@

demo: setup  ## train a small MoE model with and without memfine
	$(BIN)/memfine demo

test: setup  ## the fast tests; those of a file share what they compiled, so that one worker runs them
	$(PYTEST) --dist loadfile -m "$(FAST)"

test-torch: setup  ## the fast tests under TORCH=VERSION, in .venv-torch-VERSION; their row of docs/compatibility.md
	mkdir -p build
	$(PYTEST) -m "$(FAST)" --junitxml build/fast.xml; status=$$?; \
	$(BIN)/python -m benchmarks.compatibility --fast build/fast.xml && exit $$status

test-slow: setup  ## the slow tests
	$(PYTEST) --dist worksteal -m "slow and not campaign and not cuda"

campaign: setup  ## hours: every life under every budget
	$(PYTEST) -m campaign

examples: setup  ## the examples and the trainers' tests; writes docs/compatibility.md
	$(BIN)/python -m pip install $(PIP_FLAGS) $(PINS) -e ".[test,trainers]"
	mkdir -p build
	$(PYTEST) -m trainers --junitxml build/trainers.xml
	$(BIN)/python -m benchmarks.compatibility build/trainers.xml

golden: setup  ## write tests/golden again from what the code does now
	$(BIN)/python -m pytest -q tests/passes/test_golden.py --refresh-golden

coverage: setup  ## check every family and spelling again; writes docs/coverage.md
	$(BIN)/python -m benchmarks.coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.coverage --multimodal

# An environment of its own: the packages are only imported, so that most come without what they depend on.
PACKAGES := .venv-packages
coverage-packages:  ## check MoE layers as the registry's packages ship them; writes docs/coverage.md
	test -x $(PACKAGES)/bin/python || $(PYTHON) -m venv $(PACKAGES)
	$(PACKAGES)/bin/python -m pip install $(PIP_FLAGS) $(PINS) -e ".[test,hf]"
	$(PACKAGES)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -r benchmarks/coverage/packages.txt
	OMP_NUM_THREADS=1 $(PACKAGES)/bin/python -m benchmarks.coverage --packages

VERSIONS := .venv-versions
TRANSFORMERS := 5.2.0 5.4.0 5.6.2 5.8.1 5.10.4 5.13.1 5.15.1 5.18.0 5.20.2 5.23.0
coverage-versions: setup  ## check five families in versions of transformers; writes docs/coverage.md
	test -x $(VERSIONS)/bin/python || $(PYTHON) -m venv $(VERSIONS)
	for version in $(TRANSFORMERS); do \
	$(VERSIONS)/bin/python -m pip install $(PIP_FLAGS) -q -e ".[test]" $(shell grep ^torch== constraints.txt) \
	transformers==$$version && \
	OMP_NUM_THREADS=1 $(VERSIONS)/bin/python -m benchmarks.coverage --version || exit 1; done
	$(BIN)/python -m benchmarks.coverage --table

docs: setup  ## build the documentation strictly, into build/site
	$(BIN)/python -m pip install $(PIP_FLAGS) $(PINS) -q -e ".[docs]"
	$(BIN)/python -m benchmarks.troubleshooting --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q

figures: setup  ## draw the figures of docs/ that come from the package itself
	$(BIN)/python -m benchmarks.docs_figures
	$(BIN)/python -m benchmarks.cluster_figures

lint: setup  ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy --strict on the packages (never on ".")
	$(BIN)/mypy --strict memfine_fx planner/memfine_planner

check: lint types test  ## what a change must pass

bench: setup  ## the CPU benchmark suites; their rows go to $(OUT), one page of them to build/benchmarks.html
	$(BIN)/python -m benchmarks run --suite $(SUITES) --out "$(OUT)"
	$(BIN)/python -m benchmarks report "$(OUT)"/*_cpu.jsonl

bench-quick: setup  ## every CPU suite at small sizes: shows that all works, in minutes; its times are not for quoting
	caches=$$(mktemp -d) && trap 'rm -rf "$$caches"' EXIT && \
	$(BIN)/python -m benchmarks run --suite $(SUITES) --quick --steps 2 --parallel 3 --cache "$$caches"

gpu:  ## the GPU suite, with the Python at hand: no setup, no venv
	PYTHONPATH=. $(PYTHON) -m benchmarks run --suite gpu --json "$(OUT)/gpu.json"
	PYTHONPATH=. $(PYTHON) -m benchmarks measure gpu_layers --json-to "$(OUT)/layers.json"
	PYTHONPATH=. $(PYTHON) -m benchmarks measure gpu_model --json-to "$(OUT)/model.json"

# An environment of its own: torch's CPU build has no Triton. A build for GPUs has another, which is replaced there.
KERNELS := .venv-kernels
TRITON := 3.9.0
gpu-kernels:  ## check the GPU kernels: on a GPU or in Triton's interpreter, and compiled for four architectures
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install $(PIP_FLAGS) $(PINS) -q -e ".[test,hf]" -e planner "peft>=0.17"
	$(KERNELS)/bin/python -m pip install $(PIP_FLAGS) -q triton==$(TRITON) numpy
	TRITON_INTERPRET=$$($(KERNELS)/bin/python -c "import torch; print(int(not torch.cuda.is_available()))") \
	OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest -n 2 -q tests/kernels

# A CUDA build of torch, about 5 GB, whose wheel is named apart from the CPU's of the same version.
DRY := .venv-gpu-dry
gpu-dry:  ## compile models for an H100 without one, and compare with what is recorded
	test -x $(DRY)/bin/python || $(PYTHON) -m venv $(DRY)
	$(DRY)/bin/python -m pip install $(PIP_FLAGS) -q "torch===2.13.0"
	$(DRY)/bin/python -m pip install $(PIP_FLAGS) -q -e ".[hf]" -e planner "peft>=0.17"
	$(DRY)/bin/python -m benchmarks.gpu_dry

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
