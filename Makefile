PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test test-integrations demo demo-picture lint bench mutants chaos soak fuzz torch-tests reproduce clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "palsgd needs Python 3.11 or newer, found $$($(PYTHON) --version); use make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lab,dev]'
	@touch $@

demo: setup
	$(BIN)/palsgd demo

# The picture of the README: the top of the demo's report. It needs a Chromium.
demo-picture: setup
	$(BIN)/palsgd demo --picture docs/report.png

# Files of tests are shared out between two processes, in the order of tests/conftest.py; JOBS=0 runs
# them in one.
JOBS ?= 2
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# With the frameworks and trackers that the documentation is for; one that is missing fails here.
test-integrations: setup
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[integrations,ray,trackers]'
	PALSGD_FRAMEWORKS_REQUIRED=1 $(BIN)/python -m pytest tests/integrations

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python bench/step.py

# Single-line bugs in the core, and whether the tests find them: half an hour or more.
mutants: setup
	$(BIN)/python tests/mutants/run.py

# 300 faults by seed, and what came of each: a quarter of an hour. Some need root, and are left out
# for others.
chaos: setup
	$(BIN)/python tests/faults/chaos.py --count 300 --out runs/chaos.json

# An hour of training with a fault a minute: does anything grow?
soak: setup
	$(BIN)/python tests/faults/soak.py --minutes 60 --out runs/soak.json

# Hostile and careless input, and what becomes of it: some ten minutes.
fuzz: setup
	$(BIN)/python tests/faults/fuzz.py

# PyTorch's own tests of optimizers and schedulers, on a palsgd optimizer around each optimizer:
# make torch-tests TORCH=path/to/a/pytorch/checkout
torch-tests: setup
	@test -n "$(TORCH)" || { echo "give a pytorch checkout: make torch-tests TORCH=path"; exit 2; }
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check expecttest
	$(BIN)/python tests/torch_suite/run.py $(TORCH)
	$(BIN)/python tests/torch_suite/run.py $(TORCH) --kind LocalSGD

# The smallest version of every study of the paper, on a CPU: within an hour, and one table.
reproduce: setup
	$(BIN)/python lab/studies/reproduce.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
