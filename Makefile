# `make demo` and `make test` each work as the first command on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo docs playground results readme test test-slow faults lint format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "skipless needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# trains both blocks on the source of Python's standard library; killed and started again, it continues where it was
demo: $(READY)
	$(BIN)/skipless demo

# the site, into site/; a broken link is an error. To look at it: python3 -m http.server --directory site
docs: $(READY)
	$(BIN)/python -m tools.site build

# the site, and in it the page of docs/playground with the demo's models and ONNX Runtime Web, from npm's registry
playground: demo docs
	$(BIN)/python -m tools.playground site/playground

# everything in docs/results that is written from the archive of runs, and the README after it
results: $(READY)
	$(BIN)/skipless reproduce all --seeds 3 --runs docs/results/runs --minutes 0 --output docs/results
	$(BIN)/python -m tools.site readme

# the figures and tables of the README, from the archive of runs and the files of the benchmarks
readme: $(READY)
	$(BIN)/python -m tools.site readme

# two workers on two cores: one thread each, or they get in each other's way
test test-slow: export OMP_NUM_THREADS = 1

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

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
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
