# Every target does its own set-up: an environment with torch, then the extension built in place. Needs only Python
# (>= 3.10, with venv), a C++ compiler and make. The second run reuses both.
PYTHON ?= python3
DEFAULT_TORCH := 2.14.1
TORCH ?= $(DEFAULT_TORCH)
NO_VENV ?=
WHEEL ?=
TESTS ?= tests
ARGS ?=
RUNS ?= 12
SCHEDULE ?= zb_v
MINUTES ?= 1
RESULTS ?= out/gpu_check
# Python 3.12 if there is one that runs (a shim of pyenv may not), else empty.
PYTHON312 = $(firstword $(foreach python,python3.12 $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12*/bin/python3.12),\
  $(shell $(python) -c 'import venv' 2>/dev/null && echo $(python))))

# On a terminal pip shows its progress, and the build each file that it compiles; in a log neither is of use.
SAY := $(shell [ -t 2 ] && echo -v || echo -q)
SHOW := $(shell [ -t 2 ] || echo -q)

OPTIONS := $(PIPECOMM_CUDA:%=-cuda-%)$(PIPECOMM_FAULTS:%=-faults-%)

# One environment per torch version, so that switching costs no download. Nothing is compiled either if both have one
# Python: it has one build for every torch.
# NO_VENV=1 uses $(PYTHON) and the torch it has, and installs nothing.
ifeq ($(NO_VENV),)
  VENV := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),.venv,.venv-$(TORCH))
  PY_ENV :=
  PY_EXE := $(VENV)/bin/python
  READY := $(VENV)/.ready
  TOOLS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
  # The environment has what the build needs; build isolation would fetch it for every build.
  INSTALL = $(PY) -m pip install --no-build-isolation --no-deps --disable-pip-version-check $(SAY) \
    $(if $(WHEEL),--force-reinstall $(WHEEL),-e .)
  BUILT := build/.built-$(VENV)$(OPTIONS)$(if $(WHEEL),-wheel)
else
  PY_ENV := PYTHONPATH="$(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))"
  PY_EXE := $(PYTHON)
  READY :=
  TOOLS :=
  INSTALL = $(PYTHON) setup.py -q build_ext --inplace
  BUILT := build/.built-system$(OPTIONS)
endif
PY := $(PY_ENV) $(PY_EXE)
# Half of the tests' time is waiting. Each worker has a pool of ranks of its own (ARGS='-n 0' for a single one).
PARALLEL = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses auto --maxprocesses 4 --dist worksteal)
# One module serves every torch, and lies in python/pipecomm_ext/; WHEEL=dist/... installs that wheel instead of building.
BUILD_INPUTS := CMakeLists.txt setup.py pyproject.toml $(shell find cmake csrc)
TORCHES := $(dir $(wildcard .venv*/lib/python*/site-packages/torch))
PYTHON_DIRS := $(wildcard python tests bench examples cmake docs release setup.py)
CXX_FILES = $(shell find csrc tests/cpp bench/cpp \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) 2>/dev/null)

MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test smoke check flaky mutations clients client-tests python312 faults soak demo bench lint \
  format sanitize compile-check gpu-first gpu-check stubs docs wheels clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: TORCH=$(TORCH) (own environment per version: .venv, .venv-2.11.0, ...), PYTHON=$(PYTHON),"
	@echo "             WHEEL=dist/... (install that, build nothing), NO_VENV=1 (use PYTHON's own torch), ARGS='...' (for pytest or bench/run.py), RESULTS=$(RESULTS),"
	@echo "             SCHEDULE=$(SCHEDULE) (what the demo trains with at its end; dualpipe, 1f1b, ...),"
	@echo "             PIPECOMM_CUDA=AUTO|ON|OFF, TORCH_CUDA_ARCH_LIST, MAX_JOBS (for the build)"

ifneq ($(READY),)
$(READY): requirements-dev.txt $(EXTRA_REQUIREMENTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python >= 3.10 is needed, $(PYTHON) is {v[0]}.{v[1]}" if v < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv (Debian/Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "== $(VENV): installing torch $(TORCH) and $^: 3 to 10 minutes, or 1 to 2 if pip has them in its cache (5 GB with CUDA)"
	@$(PY) -c "" 2>/dev/null || { echo "$(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV); }
	$(PY) -m pip install --disable-pip-version-check $(SHOW) torch==$(TORCH) $(addprefix -r ,$^)
	@touch $@
endif

$(BUILT): $(READY) $(BUILD_INPUTS)
	@echo "== building the extension: 1 to 2 minutes on two cores, up to 5 with CUDA"
	@rm -f build/.built-*
	$(INSTALL)
	@mkdir -p build && touch $@

setup: $(BUILT) ## environment and extension
	@$(PY) -m pipecomm_ext info

test: $(BUILT) ## the test suite (TESTS=tests/schedules or ARGS='-k name' to choose)
	$(PY) -m pytest $(TESTS) -q $(PARALLEL) $(ARGS)

smoke: $(BUILT) ## a minute of tests through all layers, for another torch (TORCH=2.11.0)
	$(PY) -m pytest tests -q $(PARALLEL) -m smoke $(ARGS)

check: $(BUILT) ## lint and tests of what has changed since the last commit (BASE=main: since that), in a minute
	$(TOOLS) $(PY) tests/check_changes.py $(addprefix --base ,$(BASE)) $(ARGS)

flaky: $(BUILT) ## the suite RUNS=12 times in random order, every other time on busy cores: what failed even once
	$(PY) tests/flaky.py --runs $(RUNS) -- $(or $(TESTS),tests) $(ARGS)

mutations: $(BUILT) ## how many of 40 mutations of the library the tests notice (ARGS='--list' or '--only NAME')
	$(TOOLS) $(PY) tests/mutations.py $(ARGS)

clients: ## Megatron-core, transformers, torchtitan, accelerate and yunchang: as they are, and with our parts (Python 3.12)
	@[ -n "$(PYTHON312)" ] || { echo "make clients needs Python 3.12, as megatron-core does; none that runs is on PATH or in pyenv"; exit 1; }
	@$(MAKE) --no-print-directory client-tests VENV=.venv-clients PYTHON=$(PYTHON312) PIPECOMM_CUDA=OFF \
	  EXTRA_REQUIREMENTS=tests/clients/requirements.txt

client-tests: $(BUILT)
	$(PY) -m pytest tests/clients -q --disable-warnings $(ARGS)

python312:
	@echo $(PYTHON312)

faults: $(BUILT) ## every fault in every operation, and the times that are promised, on a quiet machine (long)
	PIPECOMM_TEST_FAULTS=all $(PY) -m pytest tests/reliability/test_faults_of_all_operations.py \
	  tests/reliability/test_over_hosts.py tests/reliability/test_failing_calls.py tests/test_faults.py tests/test_gone.py \
	  tests/test_shm.py tests/test_orphans.py tests/test_hosts.py tests/test_step_time.py tests/test_store.py tests/test_surroundings.py \
	  tests/reliability/test_kills.py tests/reliability/test_pauses.py tests/reliability/test_soak.py -q $(ARGS)

soak: $(BUILT) ## random programs with random faults for MINUTES=1 (ARGS='--ranks 6 --seed 7' to choose)
	$(PY) tests/reliability/soak.py --minutes $(MINUTES) $(ARGS)

demo: $(BUILT) ## train a small transformer on real text over 4 pipeline ranks, a short benchmark, another schedule
	@echo "== training over 4 pipeline stages, each step compared with the unsplit model: 20 seconds"
	$(PY) examples/train_text.py --ranks 4 --steps 50 --verify
	@echo "== messages between two ranks beside torch over gloo: 20 seconds"
	$(PY) bench/run.py p2p --ranks 2 --sizes 4K,1M
	@echo "== another schedule, $(SCHEDULE), with a picture of what ran when: 15 seconds"
	$(PY) examples/train_text.py --ranks 2 --steps 20 --schedule $(SCHEDULE) --out out/train_text_$(SCHEDULE)
	@echo "== done: out/train_text/loss.png, out/train_text_$(SCHEDULE)/timeline.html"

bench: $(BUILT) ## benchmarks (ARGS='batch --ranks 4' to choose)
	$(PY) bench/run.py $(or $(ARGS),p2p --ranks 2)

lint: $(READY) ## ruff, clang-format, pyright and mypy; nothing is changed
	$(TOOLS) ruff check $(PYTHON_DIRS)
	$(TOOLS) ruff format --check $(PYTHON_DIRS) README.md
	$(TOOLS) clang-format --dry-run -Werror $(CXX_FILES)
	$(TOOLS) pyright
	$(TOOLS) mypy

format: $(READY) ## what ruff and clang-format can mend, in place
	$(TOOLS) ruff check --fix $(PYTHON_DIRS)
	$(TOOLS) ruff format $(PYTHON_DIRS) README.md
	$(TOOLS) clang-format -i $(CXX_FILES)

sanitize: $(READY) ## C++ tests under Address-, UndefinedBehavior- and ThreadSanitizer
	for kind in address,undefined thread; do \
	  $(TOOLS) cmake -G Ninja -S tests/cpp -B build/sanitize-$$kind -DSANITIZE=$$kind && \
	  $(TOOLS) cmake --build build/sanitize-$$kind && \
	  $(TOOLS) ctest --test-dir build/sanitize-$$kind --parallel 4 --output-on-failure --timeout 900 || exit 1; \
	done

compile-check: $(READY) ## nvcc for sm_80, sm_90, sm_100: spills, registers, vector loads (no GPU needed)
	$(PY) tests/cuda_compile_check.py

gpu-first: $(READY) ## the first ten minutes on a machine with a GPU: the questions that only a device answers
	$(PY) tests/gpu/check.py --first --results $(RESULTS) $(ARGS)

gpu-check: $(READY) ## all that needs a GPU, in stages, with logs and figures in RESULTS (ARGS='--minutes 10' to choose)
	$(PY) tests/gpu/check.py --results $(RESULTS) $(ARGS)

stubs: $(BUILT) ## _C.pyi against the built module
	$(PY) -m pytest tests/test_package.py -q -k stub

docs: .venv-docs/.ready ## the documentation site, in out/site; no torch is needed, warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet $(ARGS)
	@echo "out/site/index.html; its search needs a server: $(PYTHON) -m http.server --directory out/site"

.venv-docs/.ready: requirements-docs.txt
	@echo "== .venv-docs: installing mkdocs and what it needs: half a minute"
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check $(SHOW) -r $<
	@touch $@

wheels: ## binary wheels for every installed Python, without CUDA and with it, checked, in dist (ARGS='--list' to look)
	$(PYTHON) release/build_wheels.py $(if $(TORCHES),--torch-from $(TORCHES)) $(ARGS)

clean: ## remove what was built
	rm -rf build dist out/site python/*.egg-info python/pipecomm_ext/_C.*.so \
	  .pytest_cache .ruff_cache .mypy_cache
	find python tests bench examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-*
