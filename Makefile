# Every target sets itself up: it needs python3 (>= 3.11) and make, nothing else. No C++ compiler is fine:
# what would be compiled then runs eagerly, and the run says so.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
WORKERS ?= 2
THREADS ?= 1
COVERAGE ?=
SPREAD := --dist loadscope --no-loadscope-reorder  # a file a worker; few tests may be long ones
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test coverage test-long test-floor test-engines test-xla check bench

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## distil a draft for the embedded target and print what it gains (CPU; 20 to 35 minutes on two cores of a busy machine)
	@echo "demo: python -m train"
	@$(BIN)/python -m train

test: $(READY)  ## the quick tests
	@echo "test: pytest, slow tests, engines and XLA left out"
	@TEST_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) $(SPREAD) $(COVERAGE)

coverage:  ## the quick tests, and which lines they reach
	@$(MAKE) test COVERAGE='--cov --cov-report=term'

test-long: $(READY)  ## studies, sweeps and long kill runs
	@echo "test-long: pytest -m slow"
	@$(BIN)/python -m pytest -m slow

# Those that use the most of what transformers, accelerate, datasets, Hydra and PyTorch offer.
FLOOR := $(patsubst %,tests/%.py,test_conf train/test_train_command data/test_store data/test_prepare \
  models/test_tensor_parallel models/test_sharded_checkpoint models/test_device infer/test_report \
  models/test_target models/test_families)

test-floor: $(READY)  ## telling tests with the lowest versions that pyproject.toml allows (own environment, 8 GB)
	@echo "test-floor: installing the lowest versions into .venv-floor"
	@bash scripts/setup_floor.sh .venv-floor
	@echo "test-floor: pytest, warnings shown: what old releases deprecate is no mistake of ours"
	@.venv-floor/bin/python -m pytest -n $(WORKERS) $(SPREAD) -W default $(FLOOR)

test-engines: $(READY)  ## serve our checkpoint with other engines and compare (own environments, 3 GB)
	@echo "test-engines: installing the engines into .venv-engines, transformers 4 into .venv-transformers4"
	@bash scripts/setup_engines.sh .venv-engines
	@bash scripts/setup_transformers4.sh .venv-transformers4
	@echo "test-engines: pytest tests/engines"
	@$(BIN)/python -m pytest -m engines tests/engines

test-xla: $(READY)  ## train and decode by PyTorch/XLA on its CPU device, compare (own environment, 8 GB)
	@echo "test-xla: installing PyTorch/XLA into .venv-xla"
	@bash scripts/setup_xla.sh .venv-xla
	@echo "test-xla: pytest tests/xla"
	@$(BIN)/python -m pytest -m xla tests/xla

check: $(READY)  ## formatting, lint, types, import direction, spelling
	@echo "check: ruff, pyright, import-linter, codespell"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/codespell

bench: $(READY)  ## measure speed against transformers and vLLM; writes the figures of docs/benchmarks.md and docs/features.md
	@echo "bench: scripts/bench.py"
	@$(BIN)/python scripts/bench.py --write
	@echo "bench: scripts/bench_store.py"
	@$(BIN)/python -m scripts.bench_store --write
	@echo "bench: scripts/bench_store_read.py"
	@$(BIN)/python -m scripts.bench_store_read --write

# Linux builds of torch on PyPI carry CUDA libraries (3 GB); +cpu marks the builds without. So: the build
# marked +cpu from the configured indexes, else from PyTorch's own, else the unmarked one (on macOS
# and on CPU-only mirrors that is the CPU build anyway).
# --group needs pip >= 25.1, so pip is renewed first.
$(READY): pyproject.toml
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit("error: PYTHON: must be >= 3.11; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@echo "setup: installing torch $(TORCH), CPU build"
	@$(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null \
	  || $(PIP) --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
	       'torch==$(TORCH)+cpu' 2>/dev/null \
	  || { echo "setup: no build marked +cpu found, taking the index's own torch $(TORCH)"; \
	       $(PIP) 'torch==$(TORCH)'; }
	@echo "setup: installing this package and its developer tools"
	@$(PIP) --group dev --editable .
	@touch $@
	@echo "setup: done"
