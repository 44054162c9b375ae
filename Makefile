# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: run shell check test test-all bench clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedgrove needs Python 3.11 or newer; set PYTHON=... to one")'
	$(PYTHON) -m venv .venv

# The core: what `make run` needs.
.venv/core.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

# The core, and what tests and checks need.
.venv/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@ .venv/core.stamp

## run: training alone, FedAvg and CA-AFP on built-in data, as a table and a page; words for the command line go into ARGS="..."
run: .venv/core.stamp
	$(BIN)/fedgrove run $(ARGS)
	@echo 'To type fedgrove commands yourself:  . .venv/bin/activate   (or: make shell)' >&2

## shell: a shell with the fedgrove command on its PATH; leave it with exit
shell: .venv/core.stamp
	@. $(BIN)/activate && exec "$${SHELL:-sh}" -i

## check: style and types
check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format -q --check src tests examples
	$(BIN)/mypy

## test: check, then the tests that fit in ten minutes
test: check
	$(BIN)/python -m pytest -n 2 $(ARGS)

## test-all: check, then all tests, the slow ones too
test-all: check
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" $(ARGS)

## bench: what is measured side by side, never a timed test
bench: .venv/core.stamp
	$(BIN)/fedgrove bench engine $(ARGS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
