# Everything sets itself up: a .venv is made on first use, and renewed when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
CORE   := .venv/.core
SHELL  := bash
.SHELLFLAGS := -o pipefail -c

# pip under the constraints, so that no extra can ever pull in another torch. Of what it says, what it brings is shown.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
SHOWN   := | sed -unE 's/^ *(Downloading|Using cached) ([^ ]+)(.*)/    \2\3/p; s/^(Installing collected packages).*/    installing/p'

.PHONY: help demo test test-long coverage bench docs pages lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 11

demo: $(CORE)  ## train, carry, see, diagnose, report: what the library is for, in about a minute
	$(BIN)/hiddenstate demo

test: lint  ## lint, types, tests and the examples in docstrings and pages
	@echo "Tests on two workers, about seven minutes on two cores; at the end, what was skipped and why."
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -rs -m "not long"

test-long: $(STAMP)  ## sweeps over many models and settings: what takes longer than one waits for
	@echo "Sweeps, fuzz and faults on two workers, twenty minutes or more on two cores."
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -rs -m long

coverage: $(STAMP)  ## which lines the tests run
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not long" --cov=hiddenstate --cov-report=term:skip-covered

bench: $(STAMP)  ## every benchmark, one after the other; ratios within one run
	@set -e; for file in $(filter-out benchmarks/timing.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$file"; $(BIN)/python $$file; done

docs: $(STAMP)  ## build the site into site/, offline and strictly: a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pages: $(STAMP)  ## write docs/findings from the docstrings of the rules
	$(BIN)/python mkdocs_findings.py

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and builds; .venv stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# What `make demo` needs; the rest comes with the first `make test`.
$(CORE): pyproject.toml constraints.txt
	@echo "Setting up .venv, once: torch first, which is most of it."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(INSTALL) torch $(SHOWN)
	@echo "  hiddenstate and what it draws with"
	@$(INSTALL) --editable '.[plot]' $(SHOWN)
	@touch $@

$(STAMP): $(CORE)
	@echo "Tools for tests, pages and serving, once: about a minute where they come from nearby."
	@$(INSTALL) --editable '.[dev]' $(SHOWN)
	@$(INSTALL) --no-deps aeon $(SHOWN)  # only its series are read
	@touch $@
