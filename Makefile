# `make demo` and `make test` need Python 3.11 or newer, make and a C compiler; everything else goes into .venv.
# Each step leaves a stamp in .venv, so a second run starts at once, and a change of what a step reads repeats it.

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --no-input
INSTALL = $(PIP) install --quiet --constraint constraints.txt
DEMO_FLAGS ?=
TEST_FLAGS ?=

NATIVE = setup.py $(wildcard unidist/engines/shm_native/*.[ch])
METADATA = setup.cfg pyproject.toml constraints.txt unidist/_version.py
SAMPLE = tests/third_party/unidist_sample
SAMPLE_SOURCES = $(SAMPLE)/pyproject.toml $(wildcard $(SAMPLE)/unidist_sample/*.py)
TYPED_EXTRAS = $(SAMPLE)/unidist_sample tools

.DELETE_ON_ERROR:
.DEFAULT_GOAL = help
.PHONY: help demo test check bench soak format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.demo ## train the digits example on two processes
	$(VENV)/bin/unidist launch -np 2 examples/torch/digits.py $(DEMO_FLAGS)

test: $(VENV)/.sample $(VENV)/.horovod ## run every test (TEST_FLAGS="-k name" for some)
	$(PY) -m pytest $(TEST_FLAGS)

soak: $(VENV)/.sample $(VENV)/.horovod ## run the tests that take minutes
	$(PY) -m pytest -m soak $(TEST_FLAGS)

check: $(VENV)/.dev ## what CI demands of the sources: format, lint, types, dependency rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy $(TYPED_EXTRAS)
	$(PY) tools/check_imports.py

bench: $(VENV)/.horovod ## measure side by side with the peers; prints a table, writes a plot
	$(PY) -m benchmarks

format: $(VENV)/.dev ## format the sources and mend what ruff can mend
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf *.egg-info $(SAMPLE)/build $(SAMPLE)/*.egg-info unidist/engines/_shm.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { $(PYTHON) --version; echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The project itself, editable, with its C extension, and what the examples need.
$(VENV)/.demo: $(VENV)/.made $(METADATA) $(NATIVE)
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	@rm -f unidist/engines/_shm.*.so  # one that does not fit the sources any more must not survive a failed build
	$(INSTALL) --editable '.[torch,examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) --editable '.[torch,tensorflow,horovod,mpi,examples,test,dev]'
	@touch $@

# The first time this takes about 9 minutes on 2 cores; the wheel is kept outside of .venv, and `make clean` leaves it.
$(VENV)/.horovod: $(VENV)/.dev launch/unidist_launch/horovod_build.py launch/unidist_launch/horovod_sources.py
	$(VENV)/bin/unidist build horovod
	@touch $@

# A plugin as a third party would ship it: built and installed, not editable.
$(VENV)/.sample: $(VENV)/.dev $(SAMPLE_SOURCES)
	$(INSTALL) --force-reinstall --no-deps ./$(SAMPLE)
	@touch $@
