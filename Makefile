# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv when it is absent.
PYTHON ?= python3
VENV ?= .venv
# The tested torch. Override for CUDA or a newer release: make demo TORCH='torch==2.13.0+cu130'
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# What users need, and with it what developers need.
LIGHT := $(VENV)/.installed-light
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# The default tests run in this many processes, a file at a time; the slow ones start clusters and
# run alone.
TEST_PROCESSES ?= 2
# Processes with a thread for every core wait for each other more than they compute.
TEST_THREADS ?= 1

.PHONY: help demo test test-slow test-gpu docs style check k8s-check k8s-example clean

help:
	@echo "make demo       install and pre-train, embed, evaluate a small generated graph"
	@echo "make test       install and run the default tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the tests that need CUDA"
	@echo "make docs       build the site of docs/ into site/; no warning is allowed"
	@echo "make style      format and fix"
	@echo "make check      lint and type-check"
	@echo "make k8s-check  build every overlay with kubectl kustomize, check schemas and rules"
	@echo "make k8s-example  write k8s/example.yaml again"

# torch first and alone: the rest then finds its requirement met and brings no second copy.
$(LIGHT): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $(LIGHT)

$(STAMP): $(LIGHT)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: $(LIGHT)
	$(BIN)/cimage pretrain configs/demo.yaml
	$(BIN)/cimage embed configs/demo.yaml
	$(BIN)/cimage evaluate configs/demo.yaml

test: $(STAMP)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest \
	  -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The variable silences the theme's advertisement of its successor.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Skips with a reason what needs kubectl, kubernetes-validate or KubeRay's schemas (CIMAGE_SCHEMAS).
k8s-check: $(STAMP)
	$(BIN)/python -m pytest -q tests/k8s/test_manifests.py tests/k8s/test_mistakes.py

k8s-example:
	(echo '# Made by `make k8s-example` from k8s/overlays/cpu-small/rayjob-pretrain; do not edit.'; \
	  kubectl kustomize k8s/overlays/cpu-small/rayjob-pretrain) > k8s/example.yaml

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
