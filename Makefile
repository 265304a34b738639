# Needs make and Python 3.11 or newer; everything else is installed into .venv by the first target
# that needs it, and again after setup.cfg or constraints.txt has changed.
#
#   make demo    the whole method on built-in data, with its ungrouped control
#   make test    the tests, without the slow ones
#   make lint    ruff, mypy, and how much there is to read
#   make modules every module with what it is
#   make docs    the documentation as a site in docs/site; fails on a broken link
#   make notebook  runs docs/notebooks/first_run.ipynb; fails where a cell fails
#   make bench   figures with their units, and their ratios in one table (an hour; BENCH=--short: minutes)
#   make peers   packages of open_clip_train, which benchmarks compare with
#   make slow    one short instance of the slow tests
#   make soak    the slow tests at full count (hours)
#   make clean   removes .venv and caches; runs/ is yours and stays

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint modules docs notebook bench peers slow soak clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .peers
PEERS_INSTALLED := $(PEERS)/.installed
# The first of these that runs and is new enough (a pyenv shim may exist without running).
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# constraints.txt pins torch. TORCH replaces that pin; give it an environment of its own:
# make test VENV=.venv-312 PYTHON=python3.12 TORCH='torch==2.11.0 ...'
TORCH ?=
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint $(CONSTRAINTS)
# Test processes have one thread each, and one more of them than cores, since some tests wait; those of
# several ranks come first.
# DEMO, TEST, NOTEBOOK and BENCH add options: make test TEST='-k plan'.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Where this is set, each of the many processes that tests start compiles all of mclclip.
unexport PYTHONDONTWRITEBYTECODE
BENCHMARKS := $(basename $(notdir $(wildcard tests/benchmarks/bench_*.py)))

help:
	@sed -n 's/^#   //p' Makefile

setup: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 of 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (once)"
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
ifneq ($(TORCH),)
	@grep -vE '^(torch|torchvision|setuptools)==' constraints.txt >$(CONSTRAINTS)
endif
	@$(INSTALL) $(TORCH) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/mclclip demo $(DEMO)

test: $(INSTALLED)
	$(PYTEST) -m 'not slow' -n 3 --dist loadfile --no-loadscope-reorder --durations 15 $(TEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house

modules: $(INSTALLED)
	@$(BIN)/python -m tests.house --modules

# The notice that is switched off is about another product.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

notebook: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python docs/run_notebook.py $(NOTEBOOK)

peers: $(PEERS_INSTALLED)

$(PEERS_INSTALLED): $(INSTALLED) tests/benchmarks/peers.txt
	@rm -rf $(PEERS)
	@$(PIP) install --quiet --no-deps --target $(PEERS) --requirement tests/benchmarks/peers.txt
	@touch $@

bench: $(INSTALLED) $(PEERS_INSTALLED)
	@mkdir -p .bench; rm -f .bench/tables.jsonl
	for name in $(BENCHMARKS); do echo "=== $$name"; \
		MCLCLIP_BENCH_TABLES=.bench/tables.jsonl $(BIN)/python -m tests.benchmarks.$$name $(BENCH); done
	$(BIN)/python -m tests.benchmarks.ratios .bench/tables.jsonl

slow: $(INSTALLED)
	$(PYTEST) -m slow -n 2 --dist loadfile --no-loadscope-reorder --durations 15 $(TEST)

soak: $(INSTALLED)
	MCLCLIP_SOAK=1 $(PYTEST) -m slow --durations 0 $(TEST)

clean:
	rm -rf $(VENV) $(PEERS) build dist docs/site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# On a machine with a GPU (tests/gpu/README.md); GPU adds options: make gpu GPU='--only k-means'.
.PHONY: gpu gpu-bench

gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu $(GPU)

gpu-bench: $(INSTALLED)
	$(BIN)/python -m tests.gpu.bench $(GPU)
