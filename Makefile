# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: run shell check test test-all docs docs-serve bench clean
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
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' -e lab
	touch $@ .venv/core.stamp

## run: training alone, FedAvg, CA-AFP and Grove on built-in data, as a table and a report; options of fedgrove run go into ARGS="..."
run: .venv/core.stamp
	$(BIN)/fedgrove run $(ARGS)
	@echo 'To type fedgrove commands yourself:  . .venv/bin/activate   (or: make shell)' >&2

## shell: a shell with the fedgrove command on its PATH; leave it with exit
shell: .venv/core.stamp
	@. $(BIN)/activate && exec "$${SHELL:-sh}" -i

# The extra docs, without fedgrove and torch: the site reads the code and does not import it.
.venv/docs.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26'
	touch $@

## check: style, types, and the links of all docs pages
check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format -q --check src lab tests examples tools
	$(BIN)/mypy
	$(BIN)/python -m pytest -p no:cacheprovider tests/test_site.py

## test: check, then the tests that fit in ten minutes
test: check
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Of the system packages nginx, systemd, util-linux and iproute2.
SYSTEM_PROGRAMS := nginx systemd-analyze unshare ip

## test-all: check, then all tests, the slow ones too, and new random examples; services need nginx, systemd-analyze, unshare, ip
test-all: check
	@for program in $(SYSTEM_PROGRAMS); do command -v $$program >/dev/null || \
		echo "not installed: $$program; the tests that need it are skipped" >&2; done
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" --hypothesis-profile=new $(ARGS)

# An address from the one place for them, in pyproject.toml.
address = $$($(BIN)/python -c 'import tomllib; \
	print(tomllib.load(open("pyproject.toml", "rb"))["tool"]["fedgrove"]["addresses"]["$(1)"])')

## docs: the site, into site/; a broken link or an unknown name is an error
docs: .venv/docs.stamp
	SITE_URL=$(call address,site) REPO_URL=$(call address,repository) \
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

## docs-serve: the site at an address of this machine, rebuilt when a page changes
docs-serve: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

## bench: compare the speed of engines; tests never measure speed
bench: .venv/core.stamp
	$(BIN)/fedgrove bench engine $(ARGS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
