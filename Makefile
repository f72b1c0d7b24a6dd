# Everything a newcomer types. Each target sets up its own virtual environment first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help demo test test-fast test-long lint bench goldens clean

help:  ## Say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/.run-ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(BIN)/.dev-ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) with the test and lint tools ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(BIN)/.run-ready

demo: $(BIN)/.run-ready  ## Start three processes, stream a real continuation, compare with plain decode
	@$(BIN)/dflash-up demo

test: $(BIN)/.dev-ready  ## Run all tests
	@$(BIN)/python -m pytest -q

test-long: $(BIN)/.dev-ready  ## Run all tests, and the statistics and cancels in full (half an hour)
	@$(BIN)/python -m pytest -q -m "" --timeout 1800

test-fast: $(BIN)/.dev-ready  ## Run the tests that start no process
	@$(BIN)/python -m pytest -q -m "not system and not slow and not long"

lint: $(BIN)/.dev-ready  ## Formatting, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(BIN)/.run-ready  ## Compare direct, plain, fixed and adaptive over the held-out files
	@$(BIN)/dflash-up bench

goldens:  ## Make the golden files again from the reference implementations (needs the reference extra)
	@test -x .venv-reference/bin/python || $(PYTHON) -m venv .venv-reference
	@.venv-reference/bin/python -m pip install -q -e '.[reference,test]'
	@for script in tests/golden/make_*.py; do echo "== $$script"; PYTHONPATH=.:tests .venv-reference/bin/python $$script; done

clean:  ## Remove virtual environments and caches
	@rm -rf $(VENV) .venv-reference .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
