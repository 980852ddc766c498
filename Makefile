PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint setup clean

demo: $(STAMP)
	$(BIN)/zkl-debug demo

test: $(STAMP)
	$(BIN)/ruff check zkl_debug tests
	$(BIN)/ruff format --check zkl_debug tests
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check zkl_debug tests
	$(BIN)/ruff format --check zkl_debug tests
	$(BIN)/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 12), (3, 13)) else f"python {v[0]}.{v[1]} found, 3.12 or 3.13 needed (megatron-core has no wheel for others); run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,notebooks,hf]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
