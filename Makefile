# Everything a newcomer or the continuous integration runs. `make` alone lists the targets.
#
# Each target that needs the environment builds it first, in .venv, from pyproject.toml and the
# exact versions in constraints.txt. Needed beforehand: git, make and Python >= 3.11.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first of these that is new enough; override with `make PYTHON=/path/to/python`.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python $(NEW_ENOUGH) 2>/dev/null && echo $$python && break; done)

# One thread per rank: several ranks share the cores of one machine.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import Merak in the tests: each module is compiled by the first alone.
unexport PYTHONDONTWRITEBYTECODE

# Each has ranks of its own; what one of them waits for, the other uses.
TEST_PROCESSES ?= 2
TESTS := $(wildcard tests/processes tests/unit tests/golden tests/multirank tests/mutations)
LINTED := $(wildcard src tests examples benchmarks docs)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-nccl-rules test-all lint format docs examples package compat bench quick-bench gpu-first gpu gpu-compiled zoo check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) $(NEW_ENOUGH) || { echo "Merak needs Python >= 3.11, which \"$(PYTHON)\" is not; name one with make PYTHON=/path/to/python." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	$(BIN)/python -m pip install --quiet "$$(grep -i '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## train GPT-2 on four local ranks (tp=2, pp=2)
	$(BIN)/torchrun --nproc-per-node 4 examples/pretrain_gpt2.py --output-dir runs/demo

PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal --durations 30
test: $(STAMP) ## run the essential tests: units beside those with real ranks
	$(PYTEST) -m 'not slow' $(TESTS)

test-slow: $(STAMP) ## run the slow tests, which take more than an hour on two cores
	$(PYTEST) -m slow $(TESTS)

test-nccl-rules: $(STAMP) ## run all tests with real ranks again, over groups that keep NCCL's rules
	MERAK_TEST_BACKEND=nccl_rules $(PYTEST) tests/multirank

test-all: test test-slow ## run every test: the essential ones, then the slow ones

lint: $(STAMP) ## check format, lint, types and the direction of imports
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the files as `make lint` wants them, where a tool can
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

docs: $(STAMP) ## build the pages into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict
	@echo "The pages are in site/index.html."

examples: $(STAMP) ## run every example in its short form, as written in .ci/examples
	@for example in $(wildcard examples/*.py); do \
		grep -qF "$$example" .ci/examples || { echo "$$example has no line in .ci/examples; add the command that runs it in its short form." >&2; exit 1; }; \
	done
	@PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python benchmarks/tools/quick.py .ci/examples 1

PACKAGE := runs/package
package: $(STAMP) ## build the wheel and the sdist, and train from the wheel in an environment of its own
	rm -rf $(PACKAGE)
	$(BIN)/python -m build --outdir $(PACKAGE)/dist
	$(PYTHON) -m venv $(PACKAGE)/venv
	$(PACKAGE)/venv/bin/python -m pip install --quiet "$$(grep -i '^torch==' constraints.txt)"
	$(PACKAGE)/venv/bin/python -m pip install --quiet --constraint constraints.txt $(PACKAGE)/dist/*.whl
	bash .ci/package "$(CURDIR)/$(PACKAGE)/venv/bin"

# Pairs of torch and transformers, the oldest that pyproject.toml allows and the newest there is; the
# tests are those that meet most of both: tracing, engine, checkpoints, trainer, launching, parity.
OLDEST := torch==2.11.* transformers==5.17.*
NEWEST := torch transformers
PAIRS ?= oldest newest
COMPAT := runs/compat
COMPAT_TESTS ?= $(addprefix tests/unit/,graph ops engine checkpoint trainer launch test_arguments.py) \
	$(addprefix tests/processes/test_,run_ranks.py forkserver.py) $(addprefix tests/multirank/test_,parity.py trainer_arguments.py ranks.py check.py recipes.py)
# In miniature on the CPU: what meets a GPU of that torch first.
GPU_IN_SMALL := "gpu_first.py --parts reference pp-1f1b dp-zero1" "gpu.py --parts launches"
compat: ## run a subset of the tests with the oldest and the newest torch and transformers
	@for pair in $(PAIRS); do \
		case $$pair in oldest) versions="$(OLDEST)";; newest) versions="$(NEWEST)";; *) versions="$$pair";; esac; \
		environment="$(COMPAT)/$$(echo "$$pair" | tr -c '[:alnum:].\n' _)"; \
		echo "=== $$versions"; \
		test -x "$$environment/bin/python" || $(PYTHON) -m venv "$$environment" || exit 1; \
		$$environment/bin/python -m pip install --quiet --upgrade $$(echo "$$versions" | tr , ' ') 'pytest>=9.0' pytest-xdist hypothesis 'peft>=0.18' '.[tensorboard]' || exit 1; \
		$$environment/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'; \
		$$environment/bin/python -m pytest -q --numprocesses $(TEST_PROCESSES) -m 'not slow' $(COMPAT_TESTS) || exit 1; \
		for script in $(GPU_IN_SMALL); do \
			$$environment/bin/python benchmarks/$$script --device cpu --budget-s 900 || exit 1; \
		done; \
		! $$environment/bin/python -c 'import sys, torch; sys.exit(not torch.backends.cuda.is_built())' || \
			CUDA_VISIBLE_DEVICES= $$environment/bin/python -m tests.zoo.fake_cuda || exit 1; \
	done

bench: ## list the benchmarks and what each measures
	@for script in $(wildcard benchmarks/*.py); do \
		echo "  $(BIN)/python $$script"; \
		awk -F '"""' '/"""/ {print "      " $$2; exit}' $$script; \
	done

quick-bench: $(STAMP) ## run every benchmark in its quick form, as written in .ci/benchmarks
	@for script in $(wildcard benchmarks/*.py); do \
		name="$$(basename $$script .py)"; \
		grep -qE "benchmarks[/.]$$name( |\.py)" .ci/benchmarks || { echo "$$script has no line in .ci/benchmarks; add the command that runs it in its quick form." >&2; exit 1; }; \
	done
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/src" HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/tools/quick.py .ci/benchmarks

# An environment of the user's with torch for this GPU; .venv where that has it.
GPU_PYTHON ?= python3
SEES_GPU := -c 'import sys, torch, transformers; sys.exit(not torch.cuda.is_available())'
WITH_GPU = for python in "$(GPU_PYTHON)" "$(BIN)/python"; do \
		"$$python" $(SEES_GPU) 2>/dev/null || continue; \
		echo "Using $$python."; \
		exec env -u OMP_NUM_THREADS PYTHONPATH="$(CURDIR)/src:$(CURDIR)" HF_HUB_OFFLINE=1 \
			"$$python" $(1); \
	done; \
	echo "No GPU: neither $(GPU_PYTHON) nor $(BIN)/python has transformers and a torch that sees one; name a Python that has with make $@ GPU_PYTHON=/path/to/python." >&2; \
	exit 1
gpu-first: ## on a machine with a GPU: what has never met one, in 200 seconds
	@$(call WITH_GPU,benchmarks/gpu_first.py)

gpu: ## on a machine with a GPU: the other figures of one device, in 400 seconds
	@$(call WITH_GPU,benchmarks/gpu.py)

gpu-compiled: ## on a machine with a GPU: compiled graphs, heads in chunks and float8, in 400 seconds
	@$(call WITH_GPU,benchmarks/gpu.py --parts compiled chunked float8)

ZOO_SHARDS ?= 2
zoo: $(STAMP) ## check every architecture of transformers' lists (hours), and write docs/zoo.md
	@seq 0 $$(($(ZOO_SHARDS) - 1)) | xargs -P $(ZOO_SHARDS) -I N \
		$(BIN)/python -m tests.zoo.run runs/zoo/N-of-$(ZOO_SHARDS).jsonl --shard N/$(ZOO_SHARDS)
	$(BIN)/python -m tests.zoo.table docs/zoo.md runs/zoo/*-of-$(ZOO_SHARDS).jsonl
	$(BIN)/python -m tests.zoo.widths docs/zoo.md

check: lint docs test examples quick-bench package ## what the continuous integration runs: all of the above but the slow tests

clean: ## remove .venv, caches, the built pages and the runs
	rm -rf $(VENV) site runs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
