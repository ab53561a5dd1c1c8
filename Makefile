# The two commands that matter: `make serve` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MUTATIONS ?= 100000
WORKERS ?= 2
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard csrc/cpu/*)
INSTALL := $(BIN)/python tools/install.py

.PHONY: serve test check fuzz sanitize compare format clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   install octavo, fetch the demo model and serve it on port $(PORT)"
	@echo "make test    install what the tests need, run the checks and the tests"
	@echo "make check   linters, types, import law"
	@echo "make fuzz    load a hundred thousand damaged checkpoints"
	@echo "make sanitize  the native kernels' tests with every access checked"
	@echo "make compare ARGS='--model FOLDER …'  octavo beside other engines, into docs/performance.md"
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

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.octavo-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(VENV)/.octavo-dev
	$(BIN)/python -m tests.fuzz.campaign --mutations $(MUTATIONS) --workers $(WORKERS)

sanitize: $(VENV)/.octavo-dev
	$(BIN)/python tools/sanitize.py

compare: $(VENV)/.octavo
	$(BIN)/python -m benchmarks.compare --page docs/performance.md $(ARGS)

format: $(VENV)/.octavo-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
