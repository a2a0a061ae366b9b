# make demo   train a small GPT until fp16 breaks it, read the diagnosis, open the app on it
# make test   everything a change has to pass
#
# Each needs only Python 3.11 or newer with venv; both install what constraints.txt pins into .venv, once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench samples screenshots clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.all
	@$(BIN)/ampscope demo

test: lint types
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/overhead.py

samples: $(VENV)/.dev
	$(BIN)/python sample_logs/generate.py

screenshots: $(VENV)/.dev
	$(BIN)/python tests/browser/screenshots.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "ampscope needs Python 3.11 or newer; name one, e.g. make PYTHON=python3.12 demo" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "could not create $(VENV): install the venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ampscope and what it needs into $(VENV) (once; a few minutes)"
	@$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ampscope, what it needs and its tests' tools into $(VENV) (once; a few minutes)"
	@$(PIP) --editable '.[all,dev]'
	@touch $@ $(VENV)/.all
