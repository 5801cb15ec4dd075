# Every target sets up what it needs and does so once: .venv (or .venv-NAME for another PYTHON).
#
#   make demo                   train, compare with the unplanned way, draw a timeline
#   make test                   all tests that run without a GPU
#   make test PYTHON=python3.12 the same with another interpreter
#   make lint                   ruff and mypy
#   make bench                  batching methods compared on the real schedule: 8 minutes
#   make bench-plan             plan quality against the usual method, and planning time
#   make bench-execution        planned shapes against exchanged ones, and the engine's overhead
#   make gpu-check              what only GPUs can show, on those that there are
#
# TORCH names the torch to install. On Linux the package index serves a CUDA build of several GB;
# point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels for a small one.

PYTHON ?= python3
TORCH ?= torch==2.13.0
NPROC ?= 4
CONFIG ?= configs/demo.yaml

# A pyenv shim may stand on the PATH for a version that is installed but not selected.
INTERPRETER := $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls "$$(pyenv root 2>/dev/null)"/versions/*/bin/$(notdir $(PYTHON)) 2>/dev/null | tail -n 1)
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-full test-verl lint bench bench-plan bench-execution gpu-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m megatron_batching train \
		--config $(CONFIG)

test: $(VENV)/installed
	$(BIN)/pytest

test-full: $(VENV)/installed
	$(BIN)/pytest -m "slow or not slow"

# The tests that need verl, in an environment that has it.
test-verl: $(VENV)/verl
	$(BIN)/pytest tests/test_verl_engine_multiproc.py tests/test_verl_recipe.py

bench: $(VENV)/verl
	$(BIN)/torchrun --standalone --nproc-per-node 8 -m megatron_batching bench

bench-plan: $(VENV)/installed
	$(BIN)/python -m megatron_batching.bench.plan_quality --quick --peer baseline

bench-execution: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node 8 -m megatron_batching.bench.execution shapes
	$(BIN)/torchrun --standalone --nproc-per-node 1 -m megatron_batching.bench.execution overhead

gpu-check: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node gpu -m megatron_batching.bench.gpu_check

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and alone: any other requirement would pull in the newest one.
$(VENV)/torch:
	@test -n "$(INTERPRETER)" || { echo "error: $(PYTHON) is not installed; install it, or pass \
	PYTHON=<interpreter>, 3.10 or newer" >&2; exit 2; }
	"$(INTERPRETER)" -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" setuptools wheel
	touch $@

# Editable, so that sources may change without installing again.
$(VENV)/installed: setup.py pyproject.toml | $(VENV)/torch
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[viz,dev]"
	touch $@

$(VENV)/verl: $(VENV)/installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[viz,dev,verl]"
	touch $@

clean:
	rm -rf .venv .venv-* build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
