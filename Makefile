PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# All of the series. pip writes bytecode one file after another, which takes longer than the rest of it; here all cores write
# it. What comes for other versions of Python can't be compiled, and needn't.
WITH_PYTORCH = $(PIP) --no-compile -e . && { $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; }
# An environment that uv has made has no pip, and `uv sync` takes it out again.
WITH_PIP = @$(BIN)/python -m pip --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip > /dev/null || \
  { echo "there is no pip in $(VENV), and ensurepip failed: remove $(VENV) and try again (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
.DEFAULT_GOAL := help
.PHONY: help lab installed kernel test test-all executed verdicts notebooks book test-book slides test-browser bench readme

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' Makefile

# The build of PyTorch. Without an NVIDIA driver its CUDA libraries, 2.5 GB, are left out; TORCH=cuda installs them all the same,
# before `make` or behind it.
ifndef TORCH
TORCH := $(shell nvidia-smi -L > /dev/null 2>&1 || test -e /proc/driver/nvidia/version && echo cuda || echo cpu)
endif
ifneq ($(TORCH),cpu)
ifneq ($(TORCH),cuda)
$(error TORCH=$(TORCH): allowed are cpu and cuda, the builds of PyTorch)
endif
endif

# What the file browser leaves out: the notebooks as text in notebooks/src, what pip and Python leave behind.
HIDDEN := src *.egg-info __pycache__ *.pyc *~

# JupyterLab in this environment, see .jupyterlab/README.md. A reader's own settings win.
SHARE := $(VENV)/share/jupyter

lab: $(VENV)/installed ## the notebooks in JupyterLab
	@mkdir -p $(SHARE)/lab/settings/overrides.d $(SHARE)/labextensions/flashattention-notebooks
	@cp .jupyterlab/overrides.json $(SHARE)/lab/settings/overrides.d/flashattention-notebooks.json
	@cp -R .jupyterlab/extension/. $(SHARE)/labextensions/flashattention-notebooks/
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. $(HIDDEN:%='--ContentsManager.hide_globs=%') \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB)

installed: $(VENV)/installed ## .venv with all that the notebooks need

kernel: $(VENV)/installed ## a Jupyter kernel for your own account
	$(BIN)/python -m ipykernel install --user --name flashattention-notebooks --display-name "FlashAttention notebooks"

# Tests start Python some hundred times: bytecode is written even where the environment says not to.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/installed-test ## formatters, and the tests that a change may affect
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(VENV)/installed-test ## every test, every seeded bug, every notebook; records that they passed
	$(BIN)/python -m pytest -n auto --dist worksteal --all --record

executed: $(VENV)/installed-test ## the notebooks that have changed; records that they ran
	$(BIN)/python -m pytest -n auto --dist worksteal --record tests/lessons/test_notebooks.py tests/run/test_rungs.py -k "solutions_solve or its_budget"

verdicts: $(VENV)/installed ## record what the X-ray says of every seeded bug
	$(BIN)/python -m helpers record verdicts

notebooks: $(VENV)/installed ## every notebook executed, in build/notebooks
	$(BIN)/python -m helpers notebooks

book: $(VENV)/installed-book ## the executed series as a static site, build/book/html
	$(BIN)/python -m helpers book

test-book: $(VENV)/installed-book $(VENV)/installed-test ## the site, tried in Chromium
	$(BIN)/python -m pytest tests/lessons/test_book.py tests/release/book_site.py

slides: $(VENV)/installed ## a course's slides, build/slides
	$(BIN)/python -m helpers course slides build/slides

test-browser: $(VENV)/installed-browser ## the course, tried in Chromium
	$(BIN)/python tests/release/browser_course.py build/browser

bench: $(VENV)/installed ## record the rungs' speed, errors, memory and build times on this GPU
	$(BIN)/python -m helpers record rungs

readme: $(VENV)/installed ## the tables and pictures of README.md, data/README.md and CONTRIBUTING.md
	$(BIN)/python -m helpers readme

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || \
	  { echo "Python 3.10 to 3.14 is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 -m venv failed: install it (Debian, Ubuntu: apt install python3-venv) and try again"; exit 1; }

# uv knows where PyTorch's CPU builds are; pip would have to be told.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(WITH_PIP)
	@echo "Installing PyTorch, nvcc and JupyterLab into $(VENV): once, a few minutes"
ifeq ($(TORCH),cpu)
	@echo "TORCH=cpu, the default without an NVIDIA driver: 0.4 GB to download (TORCH=cuda: 3 GB)"
	@{ $(PIP) uv && $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --torch-backend=cpu -e .; } || \
	  { echo "PyTorch's CPU build could not be installed, see above. Now PyPI's build, on Linux 2.5 GB larger:"; $(WITH_PYTORCH); }
else
	@echo "TORCH=cuda, the default with an NVIDIA driver: 3 GB to download (TORCH=cpu: 0.4 GB)"
	$(WITH_PYTORCH)
endif
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(WITH_PIP)
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/installed-book: $(VENV)/installed
	$(WITH_PIP)
	$(PIP) -e '.[book]'
	@touch $@

$(VENV)/installed-browser: $(VENV)/installed
	$(WITH_PIP)
	$(PIP) -e '.[browser]'
	@touch $@
