# Every target does its own set-up: an environment with torch, then the extension built in place. Needs only Python
# (>= 3.10, with venv), a C++ compiler and make. The second run reuses both.
PYTHON ?= python3
TORCH ?= 2.11.0
NO_VENV ?=
ARGS ?=
SCHEDULE ?= zb_v
MINUTES ?= 1
RESULTS ?= bench/results
GPU_BENCHMARKS ?= p2p pingpong batch broadcast host all_to_all gather

OPTIONS := $(PIPECOMM_CUDA:%=-cuda-%)$(PIPECOMM_FAULTS:%=-faults-%)

# One environment per torch version, so that switching costs a rebuild of the extension and no download.
# NO_VENV=1 uses $(PYTHON) and the torch it has, and installs nothing.
ifeq ($(NO_VENV),)
  VENV := $(if $(filter 2.11.0,$(TORCH)),.venv,.venv-$(TORCH))
  PY_ENV :=
  PY_EXE := $(CURDIR)/$(VENV)/bin/python
  READY := $(VENV)/.ready
  TOOLS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
  INSTALL = $(PY) -m pip install --no-build-isolation --no-deps --disable-pip-version-check -q -e .
  BUILT := build/.built-$(VENV)$(OPTIONS)
else
  PY_ENV := PYTHONPATH=$(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
  PY_EXE := $(PYTHON)
  READY :=
  TOOLS :=
  INSTALL = $(PYTHON) setup.py -q build_ext --inplace
  BUILT := build/.built-system$(OPTIONS)
endif
PY := $(PY_ENV) $(PY_EXE)
COMPUTE_SANITIZER = $(firstword $(shell command -v compute-sanitizer 2>/dev/null) $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/compute-sanitizer))
# The module lies in python/pipecomm_ext/ whatever torch it is for: only the last environment that built it has a stamp.
BUILD_INPUTS := CMakeLists.txt setup.py pyproject.toml $(shell find cmake csrc)
PYTHON_DIRS := $(wildcard python tests bench examples cmake docs setup.py)
CXX_FILES = $(shell find csrc tests/cpp bench/cpp \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) 2>/dev/null)

MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test faults soak demo bench lint format sanitize compile-check gpu-check stubs clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: TORCH=$(TORCH) (own environment per version: .venv, .venv-2.13.0, ...), PYTHON=$(PYTHON),"
	@echo "             NO_VENV=1 (use PYTHON's own torch), ARGS='...' (for pytest or bench/run.py),"
	@echo "             SCHEDULE=$(SCHEDULE) (what the demo trains with at its end; dualpipe, 1f1b, ...),"
	@echo "             PIPECOMM_CUDA=AUTO|ON|OFF, TORCH_CUDA_ARCH_LIST, MAX_JOBS (for the build)"

ifneq ($(READY),)
$(READY): requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python >= 3.10 is needed, $(PYTHON) is {v[0]}.{v[1]}" if v < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv (Debian/Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "== $(VENV): torch $(TORCH) and the tools of requirements-dev.txt"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q torch==$(TORCH) -r requirements-dev.txt
	@touch $@
endif

$(BUILT): $(READY) $(BUILD_INPUTS)
	@echo "== building the extension in place"
	@rm -f build/.built-*
	$(INSTALL)
	@mkdir -p build && touch $@

setup: $(BUILT) ## environment and extension
	@$(PY) -m pipecomm_ext info

test: $(BUILT) ## the test suite (ARGS='-k name' to choose)
	$(PY) -m pytest tests -q $(ARGS)

faults: $(BUILT) ## every fault in every operation, on both CPU transports (long; the suite plays a few)
	PIPECOMM_TEST_FAULTS=all $(PY) -m pytest tests/reliability/test_faults_of_all_operations.py -q $(ARGS)

soak: $(BUILT) ## random programs with random faults for MINUTES=1 (ARGS='--ranks 6 --seed 7' to choose)
	$(PY) tests/reliability/soak.py --minutes $(MINUTES) $(ARGS)

demo: $(BUILT) ## train a small transformer on real text over 4 pipeline ranks, a short benchmark, another schedule
	$(PY) examples/train_text.py --ranks 4 --steps 50 --verify
	$(PY) bench/run.py p2p --ranks 2 --quick
	$(PY) examples/train_text.py --ranks 2 --steps 20 --schedule $(SCHEDULE) --out out/train_text_$(SCHEDULE)

bench: $(BUILT) ## benchmarks (ARGS='batch --ranks 4' to choose)
	$(PY) bench/run.py $(or $(ARGS),p2p --ranks 2)

lint: $(READY) ## ruff and clang-format, nothing is changed
	$(TOOLS) ruff check $(PYTHON_DIRS)
	$(TOOLS) ruff format --check $(PYTHON_DIRS) README.md
	$(TOOLS) clang-format --dry-run -Werror $(CXX_FILES)

format: $(READY) ## the same, in place
	$(TOOLS) ruff check --fix $(PYTHON_DIRS)
	$(TOOLS) ruff format $(PYTHON_DIRS) README.md
	$(TOOLS) clang-format -i $(CXX_FILES)

sanitize: $(READY) ## C++ tests under Address-, UndefinedBehavior- and ThreadSanitizer
	for kind in address,undefined thread; do \
	  $(TOOLS) cmake -G Ninja -S tests/cpp -B build/sanitize-$$kind -DSANITIZE=$$kind && \
	  $(TOOLS) cmake --build build/sanitize-$$kind && \
	  $(TOOLS) ctest --test-dir build/sanitize-$$kind --output-on-failure --timeout 900 || exit 1; \
	done

compile-check: $(READY) ## nvcc for sm_80, sm_90, sm_100: spills, registers, vector loads (no GPU needed)
	$(PY) tests/cuda_compile_check.py

gpu-check: $(BUILT) ## tests and benchmarks on a machine with a GPU (NO_VENV=1 for the torch that is there)
	$(PY) -m pipecomm_ext info
	$(PY) -m pytest tests/gpu -q $(ARGS)
	@if [ -n "$(COMPUTE_SANITIZER)" ]; then \
	  $(PY_ENV) $(COMPUTE_SANITIZER) --tool memcheck --error-exitcode 1 $(PY_EXE) bench/gpu_kernels.py --mib 1; \
	else echo "== no compute-sanitizer on PATH or in CUDA_HOME: kernels are not run under it"; fi
	@mkdir -p $(RESULTS)
	$(PY) bench/gpu_kernels.py > $(RESULTS)/gpu_kernels.txt
	@cat $(RESULTS)/gpu_kernels.txt
	@num_gpus=$$($(PY) -c 'import torch; print(torch.cuda.device_count())') || exit 1; \
	if [ $$num_gpus -lt 2 ]; then echo "== benchmarks between ranks need two GPUs or more, here is $$num_gpus"; exit 0; fi; \
	for op in $(GPU_BENCHMARKS); do \
	  $(PY) bench/run.py $$op --ranks $$num_gpus --device cuda --dtype bfloat16 --json $(RESULTS)/gpu_$$op.json || exit 1; \
	done

stubs: $(BUILT) ## _C.pyi against the built module
	$(PY) -m pytest tests/test_package.py -q -k stub

clean: ## remove what was built
	rm -rf build dist python/*.egg-info python/pipecomm_ext/_C.*.so python/pipecomm_ext/_build_info.py \
	  .pytest_cache .ruff_cache .hypothesis
	find python tests bench examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-*
