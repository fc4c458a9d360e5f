# zeromesh: `make train` trains a small Llama, `make test` checks everything in minutes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
# A rank for each NVIDIA GPU; two on a machine without one.
RANKS ?= $(or $(filter-out 0,$(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)),2)
INSTALLED := $(VENV)/.installed

.PHONY: help setup train test test-all lint docs bench clean

help:
	@echo 'make setup     install zeromesh and its tools into $(VENV)'
	@echo 'make train     train a small Llama on the standard library at stage 3, with a rank for each GPU or with two'
	@echo 'make test      lint, and the tests of a few minutes'
	@echo 'make test-all  lint, and the whole matrix, whose table goes to docs/conformance.md'
	@echo 'make lint      ruff and mypy'
	@echo 'make docs      the documentation as a site that opens without a network: site/index.html'
	@echo 'make bench     step time and memory beside FSDP2, DDP and, where it can be built, DeepSpeed'
	@echo 'make clean     remove $(VENV) and what tools have cached'

setup: $(INSTALLED)

# torch comes first and alone: which build of it is taken (CPU or CUDA) decides what else is needed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.12")'
	@echo "1 of 3: a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: torch, the largest part: up to 3 GB with CUDA. While pip unpacks it, it prints nothing for some minutes"
	$(PIP) $$(grep '^torch==' constraints.txt)
	@echo "3 of 3: zeromesh, the libraries of Hugging Face and the tools of tests, about 100 packages"
	$(PIP) --editable '.[dev]'
	@touch $@
	@echo "done: source $(VENV)/bin/activate, or call $(BIN)/zeromesh"

train: setup
	$(BIN)/zeromesh train configs/quickstart.yaml --nproc $(RANKS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What runs once more on the simulated device (tests/simulated), with races, launches and waits looked after.
SIMULATED := tests/unit/offload tests/conformance tests/distributed/checkpoint tests/distributed/parallel tests/distributed/trainer/test_footprint.py

# Most tests wait: for disks, for timeouts, for each other's ranks. Two processes have half each, and who is done takes of the other.
test: lint
	$(BIN)/python -m pytest -m 'not full' --steps 4 --numprocesses 2 --dist worksteal --max-worker-restart 1
	$(BIN)/python -m pytest -m 'not full' --steps 4 --numprocesses 2 --max-worker-restart 1 --device sim --share 19 $(SIMULATED)

test-all: lint
	$(BIN)/python -m pytest --device sim --steps 4 -m 'not full' $(SIMULATED)
	$(BIN)/python -m pytest --junitxml=.pytest_cache/all.xml
	$(BIN)/python scripts/pages/matrix_table.py .pytest_cache/all.xml docs/conformance.md

# The notice that mkdocs-material prints about its end of life in 2027 is no warning about these pages.
docs: setup
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# DeepSpeed's own build wants torch to be there, and fails on some machines: then the comparison goes on without it.
bench: setup
	$(PIP) matplotlib
	-$(PIP) --no-build-isolation deepspeed
	$(BIN)/python scripts/bench_step.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
