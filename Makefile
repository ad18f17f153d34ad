# Everything sets itself up: a .venv is made on first use, and renewed when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: help demo test test-long bench docs pages lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 11

demo: $(STAMP)  ## train, carry, see, diagnose, report: what the library is for, in about a minute
	$(BIN)/hiddenstate demo

test: lint  ## lint, types, tests and the examples in docstrings and pages
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not long"

test-long: $(STAMP)  ## sweeps over many models and settings: what takes longer than one waits for
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m long

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

# pip under the constraints, so that no extra can ever pull in another torch.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps aeon  # only its series are read
	@touch $@
