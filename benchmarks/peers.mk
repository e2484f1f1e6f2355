# The runtimes that benchmarks/rpc.py compares rlmesh with, in an environment of their own; included by the Makefile.
#
# make bench-peers    install them and compare (RPC_ARGS: arguments for benchmarks/rpc.py)

PEERS_VENV ?= .venv-peers
RPC_ARGS ?=
PEERS_PYTHON := $(PEERS_VENV)/bin/python
PEERS_READY := $(PEERS_VENV)/.peers-ready-$(CHOICE)

.PHONY: bench-peers

bench-peers: $(DEMO_READY) $(PEERS_READY)
	$(BIN)/python benchmarks/rpc.py --peers-python $(PEERS_PYTHON) $(RPC_ARGS)

# torch first: without it the peers would pull in one for CUDA.
$(PEERS_READY): benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PYTHON) -m pip install --no-input --disable-pip-version-check --progress-bar off $(PIP_ARGS) '$(TORCH)'
	$(PEERS_PYTHON) -m pip install --no-input --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
	  -r benchmarks/peers.txt
	@touch $@
