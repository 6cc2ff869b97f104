# `make demo` and `make test` do all the set-up they need, on a bare machine with Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2

.PHONY: demo test test-all lint goldens docs bench clean

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

test: $(VENV)/test lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-all: $(VENV)/test lint
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/mypy

goldens: $(VENV)/test  ## write the golden files anew; read the difference before committing it
	LOSSDSL_REFRESH=1 $(BIN)/python -m pytest -q tests/test_goldens.py

docs: $(VENV)/test  ## write docs/methods.md from the specs
	$(BIN)/python docs/make_methods.py

bench: $(VENV)/test
	$(BIN)/python bench/logp.py
	$(BIN)/python bench/startup.py
	-$(BIN)/pip install --quiet --no-deps liger-kernel==0.8.5 trl==1.16.0 verl==0.9.1
	$(BIN)/python -W ignore bench/hidden.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: no other package may then pull in a different build of it.
$(VENV)/torch: constraints.txt | $(BIN)/pip
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/demo: pyproject.toml $(VENV)/torch
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/test: pyproject.toml $(VENV)/torch
	$(INSTALL) -e '.[test]'
	touch $@
