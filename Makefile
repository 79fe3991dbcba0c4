# `make demo` and `make test` set up all they need in .venv, from Python 3.11 or newer, and work again without network.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint style bench study smollm2 wheel clean

help:  ## Show what can be made
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

# torch first and alone: what depends on it must not pick another build of it.
$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "egmla needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(READY)  ## Generate text, show cache and memory, score a small task
	$(BIN)/egmla demo

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest -n 2 tests

lint: $(READY)  ## Check style without changing files
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

style: $(READY)  ## Bring all files into style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(READY)  ## Measure speed and memory beside the library's models; hours, or QUICK=1
	$(BIN)/egmla bench $(if $(QUICK),--quick)

study: $(READY)  ## Train the models of docs/study.md that are not done yet (seven to ten hours), and report
	$(BIN)/python benchmarks/study run
	$(BIN)/python benchmarks/study speed
	$(BIN)/python benchmarks/study report

smollm2: $(READY)  ## Convert and heal SmolLM2-135M (docs/conversion.md), hours, and report
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[study]'
	$(BIN)/python benchmarks/study smollm2
	$(BIN)/python benchmarks/study report

wheel: $(READY)  ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## Remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info
