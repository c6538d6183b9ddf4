# Needs python3 >= 3.11 and make, nothing else.
#
#   make setup   build .venv with every version pinned in constraints.txt
#   make demo    watch the engine at work (where the output is no terminal: run eight prompts through it)
#   make test    run all tests, two at a time (make test TEST_JOBS=8)
#   make test-clients        run the clients that people use against a server (test-clients-light: those that take seconds)
#   make docs    build the documentation into build/docs (open build/docs/index.html)
#   make lint    ruff and mypy --strict
#   make clean   remove caches and build outputs (make distclean: .venv too)

PYTHON ?= python3
TEST_JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

.PHONY: setup demo test test-clients test-clients-light docs lint format clean distclean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# An editable install knows the packages that exist when it is made: a new one beside `aioengine` asks for another.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/aioengine_kernels/cpu/src/*) $(wildcard kernels/*/__init__.py tui/*/__init__.py benchmarks/*/__init__.py)
	@$(PYTHON) -c 'import sys; sys.exit("aioengine needs Python 3.11 or newer: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

demo: setup
	@if [ -t 1 ]; then $(BIN)/aioengine top --demo; else $(BIN)/aioengine demo; fi

test: setup
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(if $(TEST_MARKS),-m "$(TEST_MARKS)")

test-clients: setup
	$(BIN)/python tests/clients/run.py
	$(BIN)/python -m pytest -q -rs -p no:xdist -m slow tests/server/test_prometheus.py

test-clients-light: setup
	$(BIN)/python tests/clients/run.py --light

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info */*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find aioengine kernels tui tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV) .venv-clients
