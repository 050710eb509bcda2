# `make help` lists the targets. The first one run creates .venv and installs into it; later ones reuse it.
PYTHON ?= python3
WORKERS ?= 2
# constraints-oldest.txt and constraints-newest.txt are the two ends; each has an environment of its own.
CONSTRAINTS ?= constraints.txt

VENV := .venv$(patsubst constraints%.txt,%,$(CONSTRAINTS))
BIN := $(VENV)/bin
INSTALL := -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)
# One thread a process: the test processes share the cores, and sums run in one order.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help demo test test-all check site bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed ## loss against learning rate from four initializations, on the embedded digits: a page and a picture
	@$(BIN)/hessinit demo

# Lint, types and imports are checked with the pinned versions only: other stubs, other complaints.
test: $(if $(filter constraints.txt,$(CONSTRAINTS)),check,$(VENV)/tested) ## check, then the tests, doctests and examples of the documents
	@$(ONE_THREAD) $(BIN)/pytest -q -n $(WORKERS)

test-all: check ## the same, and the full sweeps over the problem zoo
	@$(ONE_THREAD) $(BIN)/pytest -q -n $(WORKERS) -m "sweep or not sweep"

check: $(VENV)/tested ## lint, format, types and the import contract
	@$(BIN)/ruff check --quiet --output-format concise . && echo "lint       ok"
	@$(BIN)/ruff format --quiet --check . && echo "format     ok" || { echo "format: run $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy --no-error-summary && echo "types      ok"
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) && echo "imports    ok" || { echo "$$out"; exit 1; }

site: $(VENV)/tested ## build the documents into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && \
	  echo "open site/index.html; its search needs a server: $(BIN)/python -m http.server -d site"

bench: .venv-bench/installed ## compare cost and error with other libraries, in gradients
	@.venv-bench/bin/python benchmarks/curvature_cost.py

clean: ## remove the environments, caches and built files
	@rm -rf .venv .venv-bench .venv-oldest .venv-newest dist build site demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The demo needs the package alone; the tests bring Lightning, Transformers, a browser driver and more.
$(VENV)/installed: WHAT := .
.venv-bench/installed: WHAT := .[bench]
$(VENV)/installed .venv-bench/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is missing or older than 3.10; name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(@D) (once; torch is large, this takes some minutes) ..."
	@[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) --editable '$(WHAT)'
	@touch $@

$(VENV)/tested: $(VENV)/installed
	@echo "Installing what the tests need into $(@D) (once) ..."
	@$(@D)/bin/python $(INSTALL) --editable '.[test]'
	@touch $@
