# make demo    a six-role PPO job that learns, in a virtual environment of its own
# make test    style, types and the fast tests
# make help    everything else
#
# Set PYTHON to choose the interpreter, TORCH and PIP_ARGS to choose the torch that pip installs (CONTRIBUTING.md).

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
# Tests that run side by side, each file in one process; what measures the machine belongs to `make bench`. The fast
# tests wait for a quarter of their time, so that three fill two cores; slow ones compute.
TEST_JOBS ?= 3
SLOW_JOBS ?= 2
DEMO_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-input --disable-pip-version-check --progress-bar off $(PIP_ARGS)
export PIP_ROOT_USER_ACTION := ignore
# Bytecode is kept, also where the environment says otherwise: each process of each job in the tests would compile the
# whole package again.
unexport PYTHONDONTWRITEBYTECODE
# mypy checks modules side by side, too.
export MYPY_NUM_WORKERS ?= $(SLOW_JOBS)

# One stamp per step, inside the environment. The one of torch has its requirement in its name, so that a changed
# TORCH is installed; the others follow pyproject.toml.
CHOICE := $(shell printf '%s' '$(TORCH) $(PIP_ARGS)' | cksum | cut -d ' ' -f 1)
VENV_READY := $(VENV)/.venv-ready
TORCH_READY := $(VENV)/.torch-ready-$(CHOICE)
DEMO_READY := $(VENV)/.demo-ready-$(CHOICE)
DEV_READY := $(VENV)/.dev-ready-$(CHOICE)

# Tests that are full of arrays and tensors are not type-checked.
UNTYPED := ^tests/(examples|typing/wrong)

.PHONY: help demo test lint types fast slow soak bench clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    run the PPO demo (DEMO_ARGS: arguments for examples/ppo/main.py)'
	@echo 'make test    lint, types, fast tests (PYTEST_ARGS: arguments for pytest)'
	@echo 'make slow    tests that take minutes'
	@echo 'make soak    tests that take a quarter of an hour: kills at every point, thousands of weight syncs'
	@echo 'make engines the tests of vLLM and DeepSpeed, which it installs (ENGINES_ARGS: arguments for pytest)'
	@echo 'make bench   measure calls and start-up on this machine'
	@echo 'make bench-peers   the same calls on Ray, xoscar and Monarch (RPC_ARGS: arguments for benchmarks/rpc.py)'
	@echo 'make bench-envs    rlmesh.envs beside RLlib, Stable-Baselines3 and others (ENVS_ARGS: for benchmarks/envs_compare.py)'
	@echo 'make lint    ruff only'
	@echo 'make clean   remove the virtual environment and all caches, not the runs'

demo: $(DEMO_READY)
	$(BIN)/rlmesh launch examples/ppo/main.py -- --job_name demo $(DEMO_ARGS)

test: lint types fast

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/mypy
	MYPYPATH=.:launcher:examples:benchmarks $(BIN)/mypy --explicit-package-bases --exclude '$(UNTYPED)' tests benchmarks examples/hello.py

fast: $(DEV_READY)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

slow: $(DEV_READY)
	$(BIN)/python -m pytest -m "slow and not soak" -n $(SLOW_JOBS) --dist loadfile $(PYTEST_ARGS)

soak: $(DEV_READY)
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

bench: $(DEMO_READY)
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/startup.py

$(VENV_READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'rlmesh needs Python 3.11 or newer; name one by PYTHON=…, this is' "$$($(PYTHON) --version 2>&1)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_READY): $(VENV_READY)
	$(PIP) '$(TORCH)'
	@touch $@

$(DEMO_READY): $(TORCH_READY) pyproject.toml
	$(PIP) -e '.[demo]'
	@touch $@

$(DEV_READY): $(DEMO_READY) pyproject.toml
	$(PIP) -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

include benchmarks/peers.mk
include tests/engines/engines.mk
