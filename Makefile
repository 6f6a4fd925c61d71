# `make demo` and `make test` each work as the first command on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo playground test test-slow faults lint format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "skipless needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# trains both blocks on the source of Python's standard library; killed and started again, it goes on where it was
demo: $(READY)
	$(BIN)/skipless demo

# the page in docs/playground with the demo's models and ONNX Runtime Web, from npm's registry
playground: demo
	$(BIN)/python -m tools.playground site/playground

# two workers on two cores: one thread each, or they get in each other's way
test test-slow: export OMP_NUM_THREADS = 1

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2

faults: $(READY)
	$(BIN)/python benchmarks/faults.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
