# Few targets, each safe to repeat. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup lint test bench clean

setup: $(STAMP)

# The stamp is older than pyproject.toml only when the dependencies may have changed.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

# All benchmarks, or one by its name: make bench NAME=state
bench: setup
	$(BIN)/python -m integration.benchmarks $(NAME)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
