# Every target sets up what it needs: a virtual environment in .venv, the dependencies, the
# embedded services. Python 3.11 or newer and make are enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test lint format bench up clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.developer ## Make .venv and install everything into it

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is older. Name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

# What runs, and what a developer needs besides: the demo does not wait for the second.
$(VENV)/.user: $(VENV)/.python pyproject.toml
	@echo "Installing into $(VENV); the first time this takes a minute."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.developer: $(VENV)/.python pyproject.toml
	@echo "Installing into $(VENV); the first time this takes a minute or two."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.user $@

demo: $(VENV)/.user ## Replicate real data from one database to another and show it
	@$(BIN)/celery -A tasks demo

test: setup ## Run the tests (on embedded services, or on CLAIMCHECK_TEST_DATABASE_URL and _REDIS_URL)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Measure, and write benchmarks/results/*.json
	$(BIN)/python -m benchmarks

up: $(VENV)/.user ## Start worker, beat and Flower from the Procfile
	@$(BIN)/honcho start

clean: ## Remove what the targets made, but for the state in .claimcheck
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
