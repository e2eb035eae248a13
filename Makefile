# make train        train the example model as a Ray job, lose a replica on the way, write a report
# make test         the short tests, which need no set-up but Python packages
# make test-system  the other tests of each change: Ray, network namespaces, the VM with RDMA devices, many processes
# make test-slow    the long tests
# make test-smoke VERSION=2.14.1   the smoke set with this torch, in an environment of its own
# make test-torch VERSION=2.14.1   the smoke set, and the tests of what uses torch's insides, with this torch
# make docs         the documentation, in build/docs
#
# Each target does the set-up that it needs, once.
#
# ARGS goes to the command behind a target: make train ARGS="steps=60", make test ARGS="-k lineage",
# make test-slow ARGS="--whole --seeds 20000".
# PACKAGES adds packages to the environment of test-smoke and test-torch: make test-smoke PACKAGES="ray[default]==2.59.0".
# PYTHON is the interpreter of a new environment: make test-smoke PYTHON=python3.13.
# PIP_ARGS goes to pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# Looked for when it is first needed, and once: that starts five programs.
PYTHON ?= $(eval PYTHON := $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name)))))$(PYTHON)
PIP_ARGS ?=
ARGS ?=
EXPERIMENT ?= tiny

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SYSTEM := $(VENV)/.system-packages
SLURM := $(VENV)/.slurm-packages
DATA := $(VENV)/data-libraries
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
DURATIONS := --durations=30 --durations-min=1
# Worker processes of the tests; 0 runs them in one process.
WORKERS ?= 2
# What `make test` leaves to `make test-system`; `slow` and `gpu` are in neither.
SYSTEM_TESTS := system or smoke or netns or rdma or vm or ray or notebook
PARALLEL := --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder $(DURATIONS)
PYTEST := $(BIN)/pytest $(PARALLEL)

# One environment for each torch, and for each Python and package that is named.
VERSION ?= 2.14.1
PACKAGES ?=
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
NAMED_PYTHON = $(if $(filter command,$(origin PYTHON)),-py$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
NAMED_PACKAGES = $(subst ],,$(subst [,-,$(subst =,-,$(subst ==,-,$(addprefix -,$(PACKAGES))))))
TORCH_VENV := .venv-torch-$(VERSION)$(NAMED_PYTHON)$(subst $(SPACE),,$(NAMED_PACKAGES))
# Names in PACKAGES, without versions and extras. torch names the triton it needs, and an old torch an old setuptools.
NAMED = $(foreach each,$(PACKAGES),$(firstword $(subst [, ,$(subst =, ,$(subst <, ,$(subst >, ,$(subst ~, ,$(each))))))))
UNPINNED = $(subst $(SPACE),|,$(strip torch triton setuptools $(NAMED)))
SMOKE_TOOLS := hypothesis "pytest<9.2" pytest-timeout pytest-xdist "transformers>=5"
SMOKE_TESTS := tests/smoke tests/examples tests/ray_cluster/test_ray_run.py
TORCH_TESTS := tests/test_private_api.py tests/test_compile*.py tests/test_dynamo_backend.py tests/passes tests/collectives \
	tests/engines tests/pipeline tests/observe tests/parallel tests/replica/test_lighthouse.py tests/replica/test_membership.py \
	tests/job/test_captured*.py tests/job/test_checkpoint*.py tests/job/test_durable_state.py tests/job/test_export.py \
	tests/job/test_hosts.py tests/ray_cluster/test_placement.py

.PHONY: help train test test-system test-slow test-smoke test-torch lab native lint docs bench doctor wheel clean distclean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# ---- set-up: done once, and again only when what it depends on changes

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "helixrt needs Python 3.11 or newer" >&2; exit 1; }
	@# Debian's Python may come without ensurepip (package python3-venv): then the machine's pip brings pip.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

# The environments of test-smoke and test-torch: pinned versions but for torch and what PACKAGES names.
$(TORCH_VENV)/bin/python:
	$(PYTHON) -m venv $(TORCH_VENV)
	{ grep -vE '^($(UNPINNED))==' constraints.txt; echo "torch==$(VERSION)"; } > $(TORCH_VENV)/constraints.txt

$(TORCH_VENV)/.smoke: pyproject.toml constraints.txt | $(TORCH_VENV)/bin/python
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		-c $(TORCH_VENV)/constraints.txt -e ".[ft]" $(SMOKE_TOOLS) $(foreach each,$(PACKAGES),"$(each)")
	@touch $@

$(TORCH_VENV)/.dev: pyproject.toml constraints.txt | $(TORCH_VENV)/bin/python
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		-c $(TORCH_VENV)/constraints.txt -e ".[dev]" $(foreach each,$(PACKAGES),"$(each)")
	@touch $@

# `make test` needs none of these. Without root or apt, tests that need them are skipped and say why.
$(SYSTEM): | $(BIN)/python
	@if command -v ip >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends iproute2; \
	else echo "no iproute2, and no root or apt to install it: tests with network namespaces will be skipped"; fi
	@if command -v c++ >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends g++; \
	else echo "no C++ compiler, and no root or apt to install it: tests of the native data plane will fail"; fi
	@touch $@

# Only the slow tests need these.
$(SLURM): | $(BIN)/python
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SLURM_PACKAGES) \
			|| echo "$(SLURM_PACKAGES) could not be installed: tests under Slurm will be skipped"; \
	else echo "no Slurm, and no root or apt to install it: tests under Slurm will be skipped"; fi
	@touch $@

# Data libraries that are tested, in a folder of their own: one of them asks for other versions than this project.
$(DATA)/.installed: tests/data-libraries.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(DATA) \
		-r tests/data-libraries.txt
	@touch $@

# ---- what the set-up is for

train: $(INSTALLED)
	$(BIN)/python -m helixrt.train.submit $(if $(findstring experiment=,$(ARGS)),,+experiment=$(EXPERIMENT)) \
		"output.root=$(CURDIR)/outputs" $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m "not (gpu or slow or $(SYSTEM_TESTS))" $(ARGS)

test-system: $(INSTALLED) $(SYSTEM) $(DATA)/.installed lab native
	$(PYTEST) -m "($(SYSTEM_TESTS)) and not gpu and not slow" $(ARGS)

test-slow: $(INSTALLED) $(SYSTEM) $(SLURM) lab native
	$(PYTEST) -m "slow and not gpu" $(ARGS)

lab: $(INSTALLED) $(SYSTEM)
	@$(BIN)/helixrt lab setup || echo "no lab: tests that need RDMA devices will be skipped"

# The data plane's library, compiled into the user's cache before tests need it.
native: $(INSTALLED) $(SYSTEM)
	$(BIN)/python -m helixrt.native.build

test-smoke: $(TORCH_VENV)/.smoke
	$(TORCH_VENV)/bin/pytest $(PARALLEL) -m "smoke and not gpu" $(SMOKE_TESTS) $(ARGS)

test-torch: $(TORCH_VENV)/.dev
	$(TORCH_VENV)/bin/pytest $(PARALLEL) -m "smoke and not gpu" $(SMOKE_TESTS) $(ARGS)
	$(TORCH_VENV)/bin/pytest $(PARALLEL) -m "not smoke and not gpu and not slow" $(TORCH_TESTS) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/mypy helixrt
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(BIN)/helixrt bench $(or $(ARGS),train)

doctor: $(INSTALLED)
	$(BIN)/helixrt doctor $(ARGS)

wheel: $(INSTALLED)
	$(BIN)/python -m build

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-torch-*
