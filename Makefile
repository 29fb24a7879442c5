# make lab · test · test-all · executed · verdicts · notebooks · bench · readme
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := lab
.PHONY: lab test test-all executed verdicts notebooks bench readme

# JupyterLab's defaults for this environment: no news, README as a page, line numbers in cells. A reader's own settings win.
LAB_DEFAULTS := $(VENV)/share/jupyter/lab/settings/overrides.d/flashattention-notebooks.json

lab: $(VENV)/installed
	@mkdir -p $(dir $(LAB_DEFAULTS)) && cp .jupyterlab.json $(LAB_DEFAULTS)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal --all --record

executed: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal --record tests/lessons/test_notebooks.py tests/run/test_rungs.py -k "solutions_solve or its_budget"

verdicts: $(VENV)/installed
	$(BIN)/python -m helpers record verdicts

notebooks: $(VENV)/installed
	$(BIN)/python -m helpers notebooks

bench: $(VENV)/installed
	$(BIN)/python -m helpers record rungs

readme: $(VENV)/installed
	$(BIN)/python -m helpers readme

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 -m venv failed: install it (Debian, Ubuntu: apt install python3-venv) and try again"; exit 1; }

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing PyTorch, nvcc and JupyterLab into $(VENV): once, a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
