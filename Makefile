PYTHON ?= python3
BIN := .venv/bin
FRAMEWORKS := .venv-integrations

.PHONY: setup test test-integrations test-oldest package test-package demo demo-picture lint docs bench \
	mutants chaos soak fuzz torch-tests reproduce clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "palsgd needs Python 3.11 or newer, found $$($(PYTHON) --version); use make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lab,vision,tensorboard,dev,docs]'
	@touch $@

demo: setup
	$(BIN)/palsgd demo

# The picture of the README: the top of the demo's report. It needs a Chromium.
demo-picture: setup
	$(BIN)/palsgd demo --picture docs/report.png

# Files of tests are shared out between three processes, in the order of tests/conftest.py: many tests
# wait for processes of their own, so that two leave two cores idle for a part of the time. JOBS=0
# runs them in one.
JOBS ?= 3
PYTEST := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
test: lint
	$(BIN)/python $(PYTEST)

# With the frameworks and trackers that the documentation is for; one that is missing fails here.
test-integrations: $(FRAMEWORKS)/installed
	PALSGD_FRAMEWORKS_REQUIRED=1 $(FRAMEWORKS)/bin/python $(PYTEST) tests/integrations

# They lie in an environment of their own, so that .venv stays what `make test` is meant for. It sees
# what .venv has, and installs the rest.
$(FRAMEWORKS)/installed: .venv/installed
	$(BIN)/python -m venv --clear $(FRAMEWORKS)
	where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$where")')" \
		> "$$($(FRAMEWORKS)/bin/python -c "$$where")/below.pth"
	PIP_CONSTRAINT=constraints.txt $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[integrations,ray,trackers]'
	@touch $@

# The library on the oldest torch that pyproject.toml states, in an environment of its own.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
LIBRARY := tests/library tests/methods tests/transports tests/codecs tests/simulator tests/cluster
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python $(PYTEST) -m "not slow" $(LIBRARY)

.venv-oldest/installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[lab]' \
		'torch==$(OLDEST).*' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# The wheel and the sdist, as they are released (docs/releasing.md).
package: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# The fast tests, in the unpacked sdist; tests/packaging has what both files must be like.
UNPACKED := build/sdist
test-package: package
	rm -rf $(UNPACKED) && mkdir -p $(UNPACKED)
	tar -xzf dist/palsgd-*.tar.gz -C $(UNPACKED) --strip-components 1
	cd $(UNPACKED) && PYTHONPATH=src $(CURDIR)/$(BIN)/python -m pytest -m "not slow"
	$(BIN)/python -m pytest tests/packaging

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/site. A warning, or a link that leads nowhere, is an error.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "build/site/index.html"

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
	rm -rf .venv .venv-oldest $(FRAMEWORKS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
