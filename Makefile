# Everything happens in .venv; `make setup` is instant once it is there. PYTHON=… is the Python that makes it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo unit test check lint docs clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMP := .venv/.set-up
# Two at a time: four take as long on two cores, and a quarter more CPU time. Tests of a file stay together and share ranks.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes that import autods; without bytecode each of them, and each pytest, compiles it anew.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make setup   system packages that are missing, and .venv with the tested versions"
	@echo "make demo    set-up, then a whole fit on two CPU ranks"
	@echo "make unit    set-up, then the unit tests"
	@echo "make test    set-up, then all tests"
	@echo "make check   format, lint, types, import layers and all tests"
	@echo "make lint    the same without the tests"
	@echo "make docs    the documentation site, in autods-out/site"
	@echo "make clean   remove .venv, caches and the demo's output"

setup: $(STAMP)
	@:

# torch comes first and by itself, so that an index or folder with a CPU build of the pinned version is used as it is;
# DeepSpeed comes as source and must not build its ops here: each is built when a rung first needs it.
$(STAMP): pyproject.toml constraints.txt
	@python=$$(.ci/packages); test -x $(BIN)/python || { echo "Making .venv with $$python"; $$python -m venv .venv; }
	@echo "Installing pip and $$(grep '^torch==' constraints.txt) (the largest download)"
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@echo "Installing autods and its development tools"
	@DS_BUILD_OPS=0 $(PIP) install --constraint constraints.txt --editable . --group dev
	@touch $@
	@echo "Ready: $(BIN)/autods"

# In fp32, since processors without AVX-512 would take an hour in bf16 (docs/limits.md, CPU ranks).
demo: setup
	$(BIN)/autods fit examples/gpt.py --gpus 2 --device cpu --gpu-memory 488MiB --precision fp32 --global-batch 4 --config quick --fresh --out autods-out/demo

unit: setup
	$(PYTEST) tests/unit

test: setup
	$(PYTEST)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint
	$(PYTEST)

docs: setup
	$(PIP) install --constraint constraints.txt --group docs
	$(BIN)/python docs/reference.py --check
	$(BIN)/python docs/outputs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv autods-out dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find autods tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
