# ShardLab. Every target makes .venv when it is missing and brings it up to date when a pin changed.
# Needs Python 3.11 or newer, and make.

PYTHON ?= python3
PIP_ARGS ?=
LAB ?=
LAB_ARGS ?=
LABS ?=
WORLD_SIZE ?= 4
DEVICE ?= auto
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: help lab run test thorough lint build bench doctor grade clean
.DEFAULT_GOAL := help

help:
	@echo "make lab                      open JupyterLab on the first lab    LAB=04_ring_all_reduce LAB_ARGS=--no-browser"
	@echo "make run                      run every lab's solution            WORLD_SIZE=\"2 4\" LABS=\"04_ring_all_reduce\" DEVICE=auto"
	@echo "make test                     lint, types, notebooks in step, tests"
	@echo "make thorough                 more forms of the same faults, every lab under papermill"
	@echo "make build                    make the notebooks from solutions/*.py  LABS=\"04_ring_all_reduce\""
	@echo "make bench                    measure what the course promises"
	@echo "make doctor                   tell what this machine can do"

# JupyterLab shows no SVG among the outputs of a notebook that it has not been told to trust.
lab: $(VENV)/.student
	@name=$$($(PY) -m shardlab list --names | { if [ -n "$(LAB)" ]; then grep -- "$(LAB)"; else cat; fi; } | head -n 1); \
	if [ -z "$$name" ]; then echo "no lab matches '$(LAB)'; there are:" >&2; $(PY) -m shardlab list >&2; exit 2; fi; \
	if [ ! -f "labs/$$name.ipynb" ]; then echo "labs/$$name.ipynb is not there yet; run: make build" >&2; exit 2; fi; \
	if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; \
	$(PY) -m jupyter trust solutions/*.ipynb >/dev/null 2>&1 || true; \
	exec $(PY) -m jupyterlab $$root $(LAB_ARGS) "labs/$$name.ipynb"

run: $(VENV)/.student
	@$(PY) -m shardlab run $(LABS) --world-size $(WORLD_SIZE) --device $(DEVICE)

test: lint $(VENV)/.dev
	$(PY) -m shardlab build --check
	$(PY) -m pytest -n 2 --dist worksteal -m "not thorough" $(PYTEST_ARGS)

thorough: $(VENV)/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m thorough $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

build: $(VENV)/.dev
	@$(PY) -m shardlab build $(LABS)

bench: $(VENV)/.dev
	@$(PY) tests/bench.py

doctor: $(VENV)/.student
	@$(PY) -m shardlab doctor

grade:
	@echo "make grade: not written yet" >&2; exit 2

clean:
	rm -rf $(VENV) out

# A stamp is newer than the pins it was made from; a changed pin installs again.
$(VENV)/.student: requirements.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing the course's packages into $(VENV); the first time takes some minutes"
	@$(PIP) -r requirements.txt
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.student
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found; ShardLab needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), ShardLab needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian and Ubuntu try: apt-get install python3-venv" >&2; exit 2; }
