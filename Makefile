# Needs make and Python 3.11 or newer; everything else is installed into .venv by the first target
# that needs it, and again after setup.cfg or constraints.txt has changed.
#
#   make demo    the whole method on built-in data, with its controls
#   make test    the tests, without the slow ones
#   make lint    ruff and mypy
#   make bench   figures with their units (minutes)
#   make slow    one short instance of the slow tests
#   make soak    the slow tests at full count (hours)
#   make clean   removes .venv and caches; runs/ is yours and stays

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint bench slow soak clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The first of these that runs and is new enough (a pyenv shim may be there and not run).
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# The constraints pin a torch that is found without CUDA where pip has one.
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# Two test processes of one thread each; DEMO, TEST and BENCH add options: make test TEST='-k plan'.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
BENCHMARKS := $(basename $(notdir $(wildcard tests/benchmarks/bench_*.py)))

help:
	@sed -n 's/^#   //p' Makefile

setup: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 of 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (once)"
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/mclclip demo $(DEMO)

test: $(INSTALLED)
	$(PYTEST) -m 'not slow' -n 2 --dist loadfile --durations 15 $(TEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	for name in $(BENCHMARKS); do echo "=== $$name"; $(BIN)/python -m tests.benchmarks.$$name $(BENCH); done

slow: $(INSTALLED)
	$(PYTEST) -m slow --durations 0 $(TEST)

soak: $(INSTALLED)
	MCLCLIP_SOAK=1 $(PYTEST) -m slow --durations 0 $(TEST)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# On a machine with a GPU (tests/gpu/README.md); GPU adds options: make gpu GPU='--only k-means'.
.PHONY: gpu gpu-bench

gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu $(GPU)

gpu-bench: $(INSTALLED)
	$(BIN)/python -m tests.gpu.bench $(GPU)
