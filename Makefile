# Everything a developer does here. `make help` lists it.
#
# Needs Python 3.11 or newer, a C++ compiler, git and make; the rest is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check

# Small matrices do not gain from more threads, and two test workers share the cores.
TEST_WORKERS ?= 2
SOAK_GRAPHS ?= 2000
export OMP_NUM_THREADS ?= 1
# torch-npu, which the tests of the Ascend target read, keeps `import torch` from working without CANN
# unless it is told to stay out. hybridge says so itself; what imports torch first does not.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

ROOMS := artifacts compiler ir kernels models ops passes runner
NATIVE := CMakeLists.txt $(shell find kernels -name '*.txt' -o -name '*.map' -o -name '*.cpp' -o -name '*.h')
FORMATTED_CXX := $(filter %.cpp %.h,$(NATIVE)) $(wildcard tests/kernels/*.cpp)

.DEFAULT_GOAL := help
.PHONY: help demo install test lint format bench benchkernels soak sanitize fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## make a small model, compile it, run it and verify it
	@bash docs/demo.sh $(BIN)/hybridge build/demo

install: $(VENV)/installed-dev ## .venv with everything for working on hybridge

test: lint ## the whole suite, after lint
	$(BIN)/pytest -n $(TEST_WORKERS)

lint: $(VENV)/installed-dev build/package ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(FORMATTED_CXX),$(BIN)/clang-format --dry-run --Werror $(FORMATTED_CXX))

format: $(VENV)/installed-dev ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(FORMATTED_CXX),$(BIN)/clang-format -i $(FORMATTED_CXX))

bench: $(VENV)/installed-dev ## time the benchmark model against PyTorch and onnxruntime (half an hour, 12 GB)
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/run.py # all sides on every core

benchkernels: $(VENV)/installed-dev ## time every kernel alone against eager PyTorch and torch.compile
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/kernels.py

soak: $(VENV)/installed-dev ## the property tests with many more examples than in `make test`
	mkdir -p build
	PYTHONPATH=tests $(BIN)/python tests/passes/random_graphs.py --count $(SOAK_GRAPHS) \
	  --workers $(TEST_WORKERS) --log build/soak.txt # goes on where it was stopped; delete to start again
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -n $(TEST_WORKERS) -m hypothesis

sanitize: $(VENV)/installed-dev ## the native kernels under AddressSanitizer, UBSan and ThreadSanitizer
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tests/kernels/sanitize.sh

fuzz: $(VENV)/installed-dev ## drawn calls of every native kernel under AddressSanitizer and UBSan (MINUTES=20)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tests/kernels/fuzz.sh $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(CALL),--call $(CALL)) # a finding prints the CALL to make again

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps. An editable install holds the native library, so a changed kernel source renews it.
# Build requirements come from pyproject.toml, their one place, and are installed into .venv so that
# CMake can build incrementally (an isolated build would start anew each time).
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'hybridge needs Python 3.11 or newer: make PYTHON=python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/build-requirements: pyproject.toml | $(BIN)/python
	$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

$(VENV)/installed: pyproject.toml $(NATIVE) $(VENV)/build-requirements
	@echo 'Installing hybridge with the compiler into $(VENV) (a minute or two the first time) ...'
	$(PIP) install --no-build-isolation --editable '.[compile,text]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --no-build-isolation --editable '.[dev]'
	@touch $@

# Links that mirror the import package, for tools that do not follow an editable install.
build/package: hybridge $(ROOMS)
	@rm -rf $@ && mkdir -p $@/hybridge
	@for room in $(ROOMS); do ln -s ../../../$$room $@/hybridge/$$room; done
	@for name in hybridge/*; do ln -s ../../../$$name $@/$$name; done
