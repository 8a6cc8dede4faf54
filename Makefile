# Everything a new user needs: `make demo` shows it working, `make test` proves it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/pytest -n auto --dist worksteal --durations=15
MARKED = $(shell grep -rl --include='test_*.py' mark.$(1) tests)
TYPED := --jaxtyping-packages=fathoms,type_checker.check

.PHONY: demo test quick mutants examples fresh gpu docs shown lint clean

demo: $(READY)
	$(BIN)/fathoms train

# One thread for each of the parallel test processes: with more they only wait for each other.
test quick: export OMP_NUM_THREADS = 1
# Types and shapes are checked at run time, but not in tests of the marker plain, nor where torch compiles. Kernels need
# Triton's interpreter from the first import on. The second and third call collect only the files that have such tests.
test: $(READY) lint
	$(PYTEST) -m "not compile and not kernels and not full" $(TYPED) --ignore=tests/workshop
	$(PYTEST) -m "compile and not kernels and not full" $(call MARKED,compile)
	TRITON_INTERPRET=1 $(PYTEST) -m "kernels and not compile" $(call MARKED,kernels)

# Lint, types and the core tests, in under three minutes: before every commit.
quick: $(READY) lint
	$(PYTEST) -m "not slow and not compile and not plain and not kernels and not full and not clock" $(TYPED) \
		tests/contracts tests/golden tests/models tests/cli tests/probes tests/test_house.py tests/base

# The examples, and what README and docs show, as a reader would run it; a quarter of an hour.
examples: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[dev,notebook]"
	$(BIN)/python tests/run_examples.py

# What README promises, from a clone in an empty folder; `make test` too. Needs the network and 15 GB of disk.
fresh:
	$(PYTHON) tests/fresh_machine.py

# Faults planted one at a time where a wrong number would be silent; results/mutants.json names those no test notices.
mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

# On a machine with a GPU; CI has none, so the record is kept in results/.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu_record.py

# The workshop: pages, release, examples' texts, benchmark scripts; and the documentation as a site in build/site/html.
# A stale page or number, a warning or a dead link is an error.
docs: export OMP_NUM_THREADS = 1
docs: $(READY)
	$(BIN)/python website/generate.py --check
	$(BIN)/python website/build.py
	$(PYTEST) tests/workshop

# The outputs that pages show, beside what their commands print now; ten minutes. `--write PAGE` writes them.
shown: $(READY)
	$(BIN)/python tests/run_examples.py --shown

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/gpu_record.py --stale

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
