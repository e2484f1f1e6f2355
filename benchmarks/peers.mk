# The peers that benchmarks/rpc.py and envs_compare.py compare rlmesh with, in environments of their own; included by
# the Makefile.
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

# make bench-envs     rlmesh.envs beside the libraries of envs_peers.txt (ENVS_ARGS: arguments for envs_compare.py)

ENVS_PEERS_VENV ?= .venv-envs-peers
ENVS_ARGS ?= --json envs-compare.json
ENVS_PEERS_PYTHON := $(ENVS_PEERS_VENV)/bin/python
ENVS_PEERS_PIP := $(ENVS_PEERS_PYTHON) -m pip install --no-input --disable-pip-version-check --progress-bar off $(PIP_ARGS)
ENVS_PEERS_READY := $(ENVS_PEERS_VENV)/.peers-ready-$(CHOICE)

.PHONY: bench-envs

bench-envs: $(DEV_READY) $(ENVS_PEERS_READY)
	$(BIN)/python benchmarks/envs_compare.py --peers-python $(ENVS_PEERS_PYTHON) $(ENVS_ARGS)

$(ENVS_PEERS_READY): benchmarks/envs_peers.txt
	$(PYTHON) -m venv $(ENVS_PEERS_VENV)
	$(ENVS_PEERS_PIP) '$(TORCH)'
	$(ENVS_PEERS_PIP) -r benchmarks/envs_peers.txt
	$(ENVS_PEERS_PIP) --no-deps --ignore-requires-python cleanrl==1.2.0 gym==0.23.1
	@touch $@
