# Everything a new user needs: `make demo` shows it working, `make test` proves it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/fathoms train

# One thread for each of the parallel test processes: with more they only wait for each other.
test: export OMP_NUM_THREADS = 1
test: $(READY) lint
	$(BIN)/pytest -m "not compile and not plain" -n auto --dist worksteal --jaxtyping-packages=fathoms,beartype.beartype
	$(BIN)/pytest -m "compile or plain" -n auto --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
