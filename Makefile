# make demo             train a small GPT until fp16 breaks it, read the diagnosis, open the app on it
# make test             while you work: lint, types, the tests of each room
# make check            everything a change has to pass, as CI runs it: suites that train, drive a browser, start processes
# make lint             ruff: rules and format
# make types            mypy, strict, over the package, the tests and the scripts
# make coverage         branch coverage of package and app over the default tests, the least covered files last
# make healthy          three hundred healthy trainings, none of which may draw an alarm
# make healthy-long     the same with 500 steps each
# make plants           every fault planted in every model, and every healthy training, with a table at the end
# make mutants         loops changed mechanically and what is said of them, in a table: SEED=7 COUNT=200; without COUNT all
# make soak             faults in all of capture, kills, interrupts, hostile and injured traces, with a table; hours
# make docs             write anew what of the docs is made: the trace format, the causes, samples in their pages
# make docs-samples     run the samples of the docs, and record what is diagnosed of them
# make site             build the docs as a site into build/site, with every link checked
# make torch-versions   what touches torch, under the oldest torch supported and the newest tested
# make bench            what watching costs a loop and a framework's training, and what an incident costs
# make gpu-check        on a machine with a GPU: is AMPscope right here, and what does it cost; five minutes, one page
# make bench-app        how fast the app opens large runs and many runs
# make samples          record the sample runs in sample_logs/ again
# make screenshots      a picture of every page of the app, and those of the docs
# make dist             wheel and sdist, checked and used in fresh environments, extra by extra
# make clean            remove the environments and what tools and builds have left
#
# Each needs only Python 3.11 or newer with venv; what constraints.txt pins is installed into .venv, once.

PYTHON ?= python3
VENV ?= .venv
TORCHES ?= 2.10.0 2.15.0
TRAINS := $(addprefix tests/integration/,loops causes cured_programs guest user_code repro compiled ranks step_order planted_faults)
SOAKED := tests/integration/guest tests/integration/samples tests/integration/loops/neutral tests/integration/browser/test_foreign_pages.py \
    $(addprefix tests/unit/,trace/files trace/read trace/write capture/torch_support)
ACCELERATED := tests/unit/capture $(addprefix tests/integration/,loops planted_faults step_order user_code)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test rooms check suites axe lint types coverage healthy healthy-long plants mutants soak docs docs-samples site torch-versions bench bench-app gpu-check samples screenshots dist clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.all
	@$(BIN)/ampscope demo

# Types, which take one core, beside the tests.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 lint types rooms

rooms: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit tests/docs $(wildcard tests/test_*.py)

# Types beside the tests, as in `make test`.
check: lint axe
	@$(MAKE) --no-print-directory --jobs 2 types suites

suites: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not plants_full and not healthy_full and not soak and not accelerator"
	$(BIN)/python -m pytest -m accelerator $(ACCELERATED)

# What the pages' accessibility is checked with; without npm that one check is skipped.
axe:
	@[ -e node_modules/axe-core ] || npm install --no-save --no-package-lock axe-core@4.14.1 || echo "no npm: accessibility is not checked"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# TESTS=tests/unit/trace makes it a part.
coverage: $(VENV)/.dev
	@rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest $(TESTS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report
	@echo "Not seen: what torch calls on threads of its own, what torch.compile has compiled, and processes that are killed."

healthy: $(VENV)/.dev
	$(BIN)/python -m pytest tests/integration/healthy_runs -m ""

healthy-long: $(VENV)/.dev
	HEALTHY_STEPS=500 $(BIN)/python -m pytest tests/integration/healthy_runs -m ""

plants: $(VENV)/.dev
	$(BIN)/python -m pytest tests/integration/planted_faults -m ""

mutants: $(VENV)/.dev
	@$(BIN)/python -m tests.mutation.score

soak: $(VENV)/.dev
	$(BIN)/python -m pytest $(SOAKED) -m "not slow and not accelerator" --timeout 0

# Each version has an environment of its own, with everything but torch as pinned.
torch-versions: $(TORCHES:%=.venv-torch-%/.done)
	@for version in $(TORCHES); do \
	    echo "torch $$version"; \
	    .venv-torch-$$version/bin/python -m pytest tests/unit/capture tests/unit/cures $(TRAINS) || exit 1; \
	    .venv-torch-$$version/bin/python -m pytest -m accelerator $(ACCELERATED) || exit 1; \
	done

.venv-torch-%/.done: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-torch-$*
	@sed '/^torch==/d' constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint .venv-torch-$*/constraints.txt torch==$* --editable '.[all]' pytest pytest-xdist transformers scikit-learn
	@touch $@

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/incidents.py
	$(BIN)/python benchmarks/gpt2.py
	$(BIN)/python benchmarks/gpt2.py --time
	$(BIN)/python benchmarks/frameworks.py

# With the Python at hand (PYTHON=...), whose torch is the one for its GPU; it needs torch and pyarrow, nothing else.
gpu-check:
	@PYTHONPATH=.:benchmarks $(PYTHON) -m gpu_check

bench-app: $(VENV)/.dev
	test -d .bench/big || $(BIN)/python benchmarks/large_traces/big_trace.py .bench/big/run
	test -d .bench/many || $(BIN)/python benchmarks/large_traces/big_trace.py .bench/many --runs 500
	$(BIN)/python benchmarks/app_in_browser/large_runs.py .bench/big --runs .bench/many
	test -d .bench/ranks || $(BIN)/python benchmarks/large_traces/many_ranks.py .bench/ranks
	$(BIN)/python benchmarks/large_traces/many_ranks.py --measure .bench/ranks

samples: $(VENV)/.dev
	$(BIN)/python sample_logs/generate.py

docs: $(VENV)/.dev
	$(BIN)/python docs/generate_trace_format.py
	$(BIN)/python docs/making/generate_causes.py
	$(BIN)/python docs/making/embed_samples.py

docs-samples: $(VENV)/.dev
	$(BIN)/python docs/making/record_samples.py

site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

screenshots: $(VENV)/.dev
	$(BIN)/python tests/integration/browser/pictures/pages.py
	$(BIN)/python tests/integration/browser/pictures/guides.py

# The archives that are released, looked at by twine and used in environments of their own.
dist: | $(BIN)/python
	@rm -rf dist
	@$(BIN)/python -m venv .venv-dist && .venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m build --wheel --outdir dist/direct .
	.venv-dist/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/python tests/release/contents.py dist
	$(BIN)/python tests/release/archives_in_use.py dist

clean:
	rm -rf $(VENV) .venv-torch-* build dist .coverage .mypy_cache .pytest_cache .ruff_cache

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
