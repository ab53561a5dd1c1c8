# The two commands that matter: `make serve` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MUTATIONS ?= 100000
WORKERS ?= 2
CLIENTS ?= .venv-clients
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard csrc/cpu/*)
INSTALL := $(BIN)/python tools/install.py

.PHONY: serve test test-clients check fuzz sanitize soak chaos compare serve-compare format clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   install octavo, fetch the demo model and serve it on port $(PORT)"
	@echo "make test    install what the tests need, run the checks and the tests"
	@echo "make test-clients  what others use to talk to such a server, against a real one (needs node and npm)"
	@echo "make check   linters, types, import law"
	@echo "make fuzz    load a hundred thousand damaged checkpoints"
	@echo "make sanitize  the native kernels' tests with every access checked"
	@echo "make soak    a million streamed tokens, clients leaving early; then the books are balanced"
	@echo "make chaos   kill -9 of a random process, again and again, under clients that retry"
	@echo "make compare ARGS='--model FOLDER …'  octavo beside other engines, into docs/performance.md"
	@echo "make serve-compare ARGS='--model FOLDER …'  octavo serve beside vllm serve under load, into docs/performance.md"
	@echo "make format  format the code"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.octavo: $(BIN)/python pyproject.toml tools/install.py $(NATIVE)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.octavo-dev: $(BIN)/python pyproject.toml tools/install.py $(NATIVE)
	$(INSTALL) -e ".[dev]"
	@touch $(VENV)/.octavo $@

serve: $(VENV)/.octavo
	@exec $(BIN)/octavo serve --port $(PORT)

# Compiled modules are kept, whatever the environment says: the tests start some two hundred processes of octavo's.
test: check
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# Clients of the server, in a virtual environment and a node_modules of their own.
test-clients: $(VENV)/.octavo $(CLIENTS)/.installed tests/clients/node_modules/.package-lock.json
	OCTAVO=$(abspath $(BIN))/octavo $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini tests/clients

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet -r $<
	@touch $@

tests/clients/node_modules/.package-lock.json: tests/clients/package-lock.json
	npm ci --prefix tests/clients --no-audit --no-fund
	@touch $@

check: $(VENV)/.octavo-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(VENV)/.octavo-dev
	$(BIN)/python -m tests.fuzz.campaign --mutations $(MUTATIONS) --workers $(WORKERS)

sanitize: $(VENV)/.octavo-dev
	$(BIN)/python tools/sanitize.py $(ARGS)

soak: $(VENV)/.octavo-dev
	$(BIN)/python -m tests.soak $(ARGS)

chaos: $(VENV)/.octavo-dev
	$(BIN)/python -m tests.chaos $(ARGS)

compare: $(VENV)/.octavo
	$(BIN)/python -m benchmarks.compare --page docs/performance.md $(ARGS)

serve-compare: $(VENV)/.octavo
	$(BIN)/python -m benchmarks.serve_compare --page docs/performance.md $(ARGS)

format: $(VENV)/.octavo-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) tests/clients/node_modules build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
