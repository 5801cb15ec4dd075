# Every target sets up what it needs and does so once: .venv (or .venv-NAME for another PYTHON).
#
#   make demo                   train, compare with the unplanned way, draw a timeline
#   make test                   the tests that run without a GPU, but for the slow ones
#   make test PYTHON=python3.12 the same with another interpreter
#   make test-full              those and the slow ones: hours on 2 cores
#   make test-verl              all tests that need verl, the slow ones too
#   make mutate                 break each factor of the loss in turn: tests must fail
#   make loss-table             the table and the picture of docs/loss.md
#   make fuzz MINUTES=10        random inputs to everything that reads what a user wrote
#   make lint                   ruff and mypy
#   make docs                   the documents as a site, out/site/index.html
#   make bench                  batching methods compared on the real schedule: 8 minutes
#   make bench-plan             plan quality against verl's own partitioner, and planning time
#   make bench-execution        planned shapes against exchanged ones, and the engine's overhead
#   make gpu-check              what one GPU shows, stage by stage; GPU_CHECK="--stages layers"
#
# TORCH names the torch to install. On Linux the package index serves a CUDA build of several GB;
# point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels for a small one.

PYTHON ?= python3
TORCH ?= torch==2.13.0
NPROC ?= 4
CONFIG ?= demo
MINUTES ?= 10

# A pyenv shim may stand on the PATH for a version that is installed but not selected.
INTERPRETER := $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls "$$(pyenv root 2>/dev/null)"/versions/*/bin/$(notdir $(PYTHON)) 2>/dev/null | tail -n 1)
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
CHECKED := $(or $(wildcard $(BIN)/python),$(INTERPRETER))

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo test test-full test-verl mutate loss-table fuzz lint docs bench bench-plan bench-execution \
	gpu-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m megatron_batching train \
		--config $(CONFIG)

test: $(VENV)/verl
	$(BIN)/pytest

test-full: $(VENV)/verl
	$(BIN)/pytest -m "slow or not slow"

test-verl: $(VENV)/verl
	$(BIN)/pytest -m "slow or not slow" tests/integrations

mutate: $(VENV)/installed
	$(BIN)/python -m tests.programs.mutate_scaling

loss-table: $(VENV)/installed
	LOSS_TABLE=docs/loss.md $(BIN)/pytest -m slow tests/loss/test_loss_table_multiproc.py
	$(BIN)/python -m tests.programs.loss_curves docs/images/loss_curves.png

fuzz: $(VENV)/installed
	$(BIN)/python -m tests.programs.fuzz --minutes $(MINUTES)

bench: $(VENV)/verl
	$(BIN)/torchrun --standalone --nproc-per-node 8 -m megatron_batching bench

bench-plan: $(VENV)/verl
	$(BIN)/python -m megatron_batching.studies.plan_quality --quick
	$(BIN)/python -m megatron_batching.studies.plan_quality --speed

bench-execution: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node 8 -m megatron_batching.studies.execution shapes
	$(BIN)/torchrun --standalone --nproc-per-node 1 -m megatron_batching.studies.execution overhead

# Installs nothing: it says what the interpreter lacks, .venv's or where there is none $(PYTHON).
gpu-check:
	@"$(CHECKED)" -c 'import megatron_batching.schedules' 2>/dev/null || { echo "error: \
	megatron_batching is not installed for $(CHECKED): make $(VENV)/installed, or pip install \
	--no-deps -e . for an interpreter that has Transformer Engine" >&2; exit 2; }
	"$(CHECKED)" -m megatron_batching.studies.gpu_program $(GPU_CHECK)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The reference is read from the package as it is installed, `schedules` inside it.
docs: $(VENV)/docs
	rm -rf out/package
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target out/package .
	$(BIN)/mkdocs build --quiet

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

# verl's workers import a web server, which otherwise comes with the rollout engine. There is no
# verl for Python 3.13 and newer: its tests are skipped there, and say so.
$(VENV)/verl: $(VENV)/installed
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		$(BIN)/pip install --quiet --no-build-isolation --editable ".[viz,dev,verl]" \
			fastapi uvicorn || { echo "error: verl, which the tests drive, could not be installed \
	(see above); with an index that has it, run make again" >&2; exit 2; }; \
	else echo "verl needs Python 3.12 or older: tests that drive it are skipped"; fi
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[viz,dev,docs]"
	touch $@

clean:
	rm -rf .venv .venv-* build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
