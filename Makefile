# make train        train the example model as a Ray job, lose a replica on the way, write a report
# make test         the short tests, which need no set-up but Python packages
# make test-system  the other tests of each change: Ray, network namespaces, the VM with RDMA devices, many processes
# make test-slow    the long tests
# make docs         the documentation, in build/docs
#
# Each target does the set-up that it needs, once.
#
# ARGS goes to the command behind a target: make train ARGS="steps=60", make test ARGS="-k lineage",
# make test-slow ARGS="--whole --seeds 20000".
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
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
DURATIONS := --durations=30 --durations-min=1
# Worker processes of the tests; 0 runs them in one process.
WORKERS ?= 2
# What `make test` leaves to `make test-system`; `slow` and `gpu` are in neither.
SYSTEM_TESTS := system or netns or rdma or vm or ray or notebook
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder $(DURATIONS)

.PHONY: help train test test-system test-slow lab lint docs bench doctor wheel clean distclean

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

# `make test` needs none of these. Without root or apt, tests that need them are skipped and say why.
$(SYSTEM): | $(BIN)/python
	@if command -v ip >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends iproute2; \
	else echo "no iproute2, and no root or apt to install it: tests with network namespaces will be skipped"; fi
	@touch $@

# Only the slow tests need these.
$(SLURM): | $(BIN)/python
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SLURM_PACKAGES) \
			|| echo "$(SLURM_PACKAGES) could not be installed: tests under Slurm will be skipped"; \
	else echo "no Slurm, and no root or apt to install it: tests under Slurm will be skipped"; fi
	@touch $@

# ---- what the set-up is for

train: $(INSTALLED)
	$(BIN)/python -m helixrt.train.submit $(if $(findstring experiment=,$(ARGS)),,+experiment=$(EXPERIMENT)) \
		"output.root=$(CURDIR)/outputs" $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m "not (gpu or slow or $(SYSTEM_TESTS))" $(ARGS)

test-system: $(INSTALLED) $(SYSTEM) lab
	$(PYTEST) -m "($(SYSTEM_TESTS)) and not gpu and not slow" $(ARGS)

test-slow: $(INSTALLED) $(SYSTEM) $(SLURM) lab
	$(PYTEST) -m "slow and not gpu" $(ARGS)

lab: $(INSTALLED) $(SYSTEM)
	@$(BIN)/helixrt lab setup || echo "no lab: tests that need RDMA devices will be skipped"

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
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
