# Few targets, each safe to repeat. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup lint test tour bench clean

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

# Every type of state through kill -9, at parallelism 2, then 3, then 5; each run ends by SIGKILL.
tour: setup
	@folder=$$(mktemp -d) && for parallelism in 2 3 5; do \
	  $(BIN)/python docs/examples/state_tour.py $$folder $$parallelism; \
	  test $$? -eq 137 || exit 1; done; rm -rf $$folder

# All benchmarks, or one by its name: make bench NAME=state
bench: setup
	$(BIN)/python -m integration.benchmarks $(NAME)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
