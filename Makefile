# `make demo` and `make test` need Python 3.11 or newer, make and a C compiler; everything else goes into .venv, for the
# tests without PyTorch into .venv-tensorflow, for those of JAX into .venv-jax, and for those of other libraries into
# .venv-integrations. Each step leaves a stamp there, so a second run starts at once, and a change of what a step reads
# repeats it.

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PIP_INSTALL = -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt
INSTALL = $(PY) $(PIP_INSTALL)
FRAMEWORK ?= torch
DEMO_FLAGS ?=
TEST_FLAGS ?=
SANITIZE_FLAGS ?=
# Tests run in so many processes at a time; 0: in one, as a debugger needs it. Two take little more than half the time.
TEST_WORKERS ?= 2

NATIVE = setup.py $(wildcard $(addsuffix /*.[ch],unidist/engines/shm_native unidist/algorithms/native \
  plugins/unidist_tcp/native plugins/unidist_parameter_server/native adapters/unidist_jax/native \
  adapters/unidist_tensorflow/native))
BUILT = $(addsuffix .*.so,unidist/engines/_shm unidist/algorithms/_kernels plugins/unidist_tcp/_tcp \
  plugins/unidist_parameter_server/native/_shards adapters/unidist_jax/_handler \
  adapters/unidist_tensorflow/_nodes)
METADATA = setup.cfg pyproject.toml constraints.txt unidist/_version.py
SAMPLES = tests/third_party/unidist_sample tests/third_party/unidist_second
SAMPLE_SOURCES = $(addsuffix /pyproject.toml,$(SAMPLES)) $(foreach sample,$(SAMPLES),$(wildcard $(sample)/$(notdir $(sample))/*.py))
# A user's script is checked without a configuration. Samplers of PyTorch want an annotation wherever they are made.
AS_USERS_DO = --config-file= --explicit-package-bases --follow-imports=silent --ignore-missing-imports \
	--check-untyped-defs --disable-error-code=var-annotated
TYPED_EXTRAS = $(foreach sample,$(SAMPLES),$(sample)/$(notdir $(sample))) tools

# The demo of each framework: the script, the extra of setup.cfg that it needs, and variables that keep it quiet.
FRAMEWORKS = torch keras jax
DEMO_SCRIPT_torch = examples/torch/digits.py
DEMO_EXTRA_torch = torch
DEMO_SCRIPT_keras = examples/keras/digits_fit.py
DEMO_EXTRA_keras = tensorflow
DEMO_ENV_keras = TF_CPP_MIN_LOG_LEVEL=1 TF_ENABLE_ONEDNN_OPTS=0
DEMO_SCRIPT_jax = examples/jax/digits.py
DEMO_EXTRA_jax = jax

# An environment without PyTorch, where unidist is installed from its wheel, and the tests that run there. (-P: they
# import what is installed, not the folders here.)
TF_VENV = $(VENV)-tensorflow
TF_PY = $(TF_VENV)/bin/python
# What is installed there: a wheel, or the folder of the sources, of which one is built.
WHEEL ?= .
TF_TESTS = tests/test_without_torch.py tests/test_imports.py $(ONLY_WITHOUT_TORCH)
# `make test` runs these only here, and not in the environment with PyTorch as well.
ONLY_WITHOUT_TORCH = tests/examples/keras/test_digits_fit.py::test_two_processes_read_over_95_percent \
  $(addprefix tests/adapters/unidist_tensorflow/, test_facade.py \
    $(addprefix keras/test_fit.py::test_, equal_weights_after_fit_on_different_data mixed_precision) \
    $(addprefix operations/test_api.py::test_, \
      every_operation_on_every_dtype process_sets reductions_shapes_and_scaling))
TF_TEST = $(TF_PY) -P -m pytest -m "not soak" $(TF_TESTS)
# An environment with JAX, and the tests that need it. TensorFlow imports JAX wherever it is installed, which costs each
# process a second and a hundred megabytes; so this one has no TensorFlow.
JAX_VENV = $(VENV)-jax
JAX_PY = $(JAX_VENV)/bin/python
JAX_EXTRAS ?= jax,jax-models,torch,mpi,examples,test
JAX_TESTS = tests/adapters/unidist_jax tests/random_models/test_random_jax.py $(wildcard tests/plugins/*/_jax tests/parallel/test_jax_*.py) tests/examples/jax
# JAX 0.11 needs Python 3.12. For all tests with it: make test-jax PYTHON=python3.12 JAX_VENV=.venv-jax-newest
# Without PyTorch, which is large: its package for this Python has CUDA.
JAX_NEWEST_PYTHON ?= python3.12
JAX_NEWEST_VENV = $(VENV)-jax-newest
define JAX_NEWEST
$(MAKE) PYTHON=$(JAX_NEWEST_PYTHON) JAX_VENV=$(JAX_NEWEST_VENV) JAX_EXTRAS=jax,jax-models,mpi,examples,test $(JAX_NEWEST_VENV)/.installed
$(JAX_NEWEST_VENV)/bin/python -m pytest --quick $(IN_PARALLEL) $(JAX_TESTS) $(TEST_FLAGS)
endef
# An environment with the libraries that train through a plugin of theirs, and with those of scripts of the field: the
# extras of setup.cfg, and the tests that need them. Elsewhere those tests are skipped.
INTEGRATIONS = lightning transformers torchft field ray spark tensorboard mlflow wandb notebook kubernetes
INTEGRATION_TESTS = tests/field $(wildcard $(addprefix tests/plugins/unidist_,$(INTEGRATIONS)) \
  $(addprefix tests/examples/,$(INTEGRATIONS)))
INTEGRATIONS_VENV = $(VENV)-integrations
INTEGRATIONS_PY = $(INTEGRATIONS_VENV)/bin/python
comma = ,
empty =
PACKAGED = $(shell find unidist adapters plugins launch -name '*.py' -o -name '*.pyi' -o -name py.typed)

.DELETE_ON_ERROR:
.NOTPARALLEL:  # several steps build in ./build
.DEFAULT_GOAL = help
.PHONY: help demo test test-all test-affected test-without-torch test-jax test-jax-newest test-integrations gpu test-gpu bench-gpu check coverage docs release bench soak soak-sample sanitize format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' Makefile

ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifneq ($(words $(FRAMEWORK))$(filter-out $(FRAMEWORKS),$(FRAMEWORK)),1)
$(error FRAMEWORK="$(FRAMEWORK)" has no demo; choose one of: $(FRAMEWORKS))
endif
endif

demo: $(VENV)/.demo-$(FRAMEWORK) ## train the digits example on two processes (FRAMEWORK=torch, keras or jax)
	$(DEMO_ENV_$(FRAMEWORK)) $(VENV)/bin/unidist launch -np 2 $(DEMO_SCRIPT_$(FRAMEWORK)) $(DEMO_FLAGS)

IN_PARALLEL = --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder

# With TEST_FLAGS somebody wants certain tests, which may be slow, and hardly those of JAX.
test: $(VENV)/.sample $(if $(TEST_FLAGS),,$(JAX_VENV)/.installed) ## run the quick tests, which need nothing but what this installs (TEST_FLAGS="-k name" for any tests)
	$(PY) -m pytest $(IN_PARALLEL) $(or $(TEST_FLAGS),--quick)
	$(if $(TEST_FLAGS),,$(JAX_PY) -m pytest --quick $(IN_PARALLEL) $(JAX_TESTS))

test-all: $(VENV)/.sample $(VENV)/.horovod $(TF_VENV)/.installed ## run all tests of PyTorch, TensorFlow and the core that take minutes together; writes tests/durations.json
	$(PY) -m pytest --write-durations $(IN_PARALLEL) $(TEST_FLAGS) $(addprefix --deselect=,$(ONLY_WITHOUT_TORCH))
	$(TF_TEST) $(TEST_FLAGS)
	$(PY) -m tools.ci record all

test-affected: $(VENV)/.sample ## run the tests that uncommitted changes can affect, but for those of JAX and other libraries
	$(PY) -m tools.affected > out/affected.txt
	TEST_ONLY=out/affected.txt $(PY) -m pytest $(IN_PARALLEL) $(TEST_FLAGS)

test-without-torch: $(TF_VENV)/.installed ## run the tests of TensorFlow in an environment without PyTorch
	$(TF_TEST) $(TEST_FLAGS)

test-jax: $(JAX_VENV)/.installed ## run the tests of JAX, in an environment with it
	$(JAX_PY) -m pytest --write-durations $(IN_PARALLEL) $(JAX_TESTS) $(TEST_FLAGS)
	$(JAX_PY) -m tools.ci record jax

test-jax-newest: ## run the quick tests of JAX with its newest version, if there is a Python for it (JAX_NEWEST_PYTHON)
	$(if $(shell $(JAX_NEWEST_PYTHON) --version 2> /dev/null),$(JAX_NEWEST),@echo "left out: the newest JAX needs $(JAX_NEWEST_PYTHON), which is missing")

test-integrations: $(INTEGRATIONS_VENV)/.installed ## run the tests with Lightning, Ray, Spark, transformers, timm and trackers, in an environment with these
	$(INTEGRATIONS_PY) -m pytest --write-durations $(IN_PARALLEL) $(INTEGRATION_TESTS) $(TEST_FLAGS)
	$(INTEGRATIONS_PY) -m tools.ci record integrations

show-%:
	@echo $($*)

# Of another environment, if that has the build of PyTorch for CUDA: GPU_PY=python3, with unidist installed there.
GPU_PY ?= $(PY)
GPU_ENVIRONMENT = $(if $(filter $(PY),$(GPU_PY)),$(VENV)/.dev)

# For a machine without a network: GPU_PY=python3 make gpu; `make build/.for-gpu` has built what it needs.
gpu: $(if $(filter $(PY),$(GPU_PY)),$(VENV)/.dev,build/.for-gpu) ## prove on a GPU what CPUs cannot show, in 9 minutes (DEVICE=cpu: a rehearsal without one)
	$(GPU_PY) -m tools.gpu --device $(DEVICE) $(GPU_FLAGS)

DEVICE ?= gpu
GPU_FLAGS ?=

# What another environment needs to run the sources as they are: the extensions, and the list of plugins.
build/.for-gpu: $(NATIVE) $(METADATA) build/.extensions
	$(GPU_PY) setup.py --quiet build_ext --inplace
	$(GPU_PY) setup.py --quiet egg_info
	@touch $@

test-gpu: $(GPU_ENVIRONMENT) ## run the tests that need a GPU; without one each says so and is skipped
	$(GPU_PY) -m pytest -m gpu $(TEST_FLAGS)

bench-gpu: $(GPU_ENVIRONMENT) ## measure over NCCL beside PyTorch: bus bandwidth, step time, memory
	$(GPU_PY) -m benchmarks.gpu $(BENCH_FLAGS)

soak: $(VENV)/.sample $(VENV)/.horovod $(JAX_VENV)/.installed ## run the tests that take minutes
	$(PY) -m pytest -m soak $(TEST_FLAGS)
	$(JAX_PY) -m pytest -m soak $(JAX_TESTS) $(TEST_FLAGS)

soak-sample: $(VENV)/.sample $(VENV)/.horovod $(JAX_VENV)/.installed ## run one case of each of these, another one every day
	$(PY) -m pytest -m soak --one-of-each $$(date +%j) $(IN_PARALLEL) $(TEST_FLAGS)
	$(JAX_PY) -m pytest -m soak --one-of-each $$(date +%j) $(IN_PARALLEL) $(JAX_TESTS) $(TEST_FLAGS)

sanitize: $(VENV)/.dev ## run the C code under the address, undefined-behaviour and thread sanitizers
	$(PY) -m tools.sanitize $(SANITIZE_FLAGS)

check: $(VENV)/.dev ## what CI demands of the sources: format, lint, types, layout, spelling
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy $(TYPED_EXTRAS)
	MYPYPATH=.:adapters:plugins:launch $(PY) -m mypy $(AS_USERS_DO) examples
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m codespell_lib
	$(PY) -m tools.layout

coverage: $(VENV)/.sample $(VENV)/.horovod $(VENV)/.coverage ## run the tests and show which lines they reach; writes out/coverage
	COVERAGE_ROOT=$(CURDIR) $(PY) -m pytest --cov --cov-report=term --cov-report=html:out/coverage/html $(TEST_FLAGS)

docs: $(VENV)/.docs ## build the documentation into out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict

# The wheel is built from the archive of sources, so that both are proven; auditwheel says how old a system may be.
release: $(VENV)/.release ## build what a release uploads, into dist, and check it; uploads nothing
	$(PY) -m tools.release
	rm -rf dist build/lib build/lib.* build/bdist.*
	$(PY) -m build --outdir dist .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(PY) -m twine check --strict dist/*

bench: $(VENV)/.horovod ## measure side by side with the peers, in 15 minutes; prints a table, writes a plot (BENCH=all: all of it)
	$(PY) -m benchmarks $(if $(filter all,$(BENCH)),--all) $(BENCH_FLAGS)

format: $(VENV)/.dev ## format the sources and mend what ruff can mend
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) $(TF_VENV) $(JAX_VENV) $(JAX_NEWEST_VENV) $(INTEGRATIONS_VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf *.egg-info $(foreach sample,$(SAMPLES),$(sample)/build $(sample)/*.egg-info) $(BUILT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made $(TF_VENV)/.made $(JAX_VENV)/.made $(INTEGRATIONS_VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { $(PYTHON) --version; echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(@D)
	@touch $@

# The extensions are built in place, and serve all environments. Old ones must not survive a failed build, and present
# ones may be in use.
build/.extensions: $(NATIVE)
	@rm -f $(BUILT)
	@mkdir -p $(@D) && touch $@

# The project itself, editable, with its C extension, and what the example needs.
$(VENV)/.demo-%: $(VENV)/.made $(METADATA) build/.extensions
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	@$(PY) -m tools.demo_packages $(DEMO_EXTRA_$*) $(PY) > $(VENV)/demo-options
	$(INSTALL) $$(cat $(VENV)/demo-options) --editable '.[$(DEMO_EXTRA_$*),examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo-torch
	$(INSTALL) --editable '.[torch,tensorflow,horovod,mpi,examples,test,dev]'
	$(INSTALL) --no-deps tf_keras  # which asks for the package tensorflow; tensorflow-cpu is the same, but smaller
	@touch $@

$(VENV)/.coverage: $(VENV)/.dev
	$(INSTALL) --editable '.[coverage]'
	@touch $@

$(VENV)/.docs: $(VENV)/.made $(METADATA) build/.extensions
	@echo "installing what builds the documentation into $(VENV)"
	$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/.release: $(VENV)/.made $(METADATA) build/.extensions
	@echo "installing what builds a release into $(VENV)"
	$(INSTALL) --editable '.[release]'
	@touch $@

# The first time this takes about 9 minutes on 2 cores; the wheel is kept outside of .venv, and `make clean` leaves it.
$(VENV)/.horovod: $(VENV)/.dev launch/unidist_launch/horovod_build/build.py launch/unidist_launch/horovod_build/sources.py
	$(VENV)/bin/unidist build horovod
	@touch $@

# A plugin as a third party would ship it: built and installed, not editable.
$(VENV)/.sample: $(VENV)/.dev $(SAMPLE_SOURCES)
	$(INSTALL) --force-reinstall --no-deps $(addprefix ./,$(SAMPLES))
	@touch $@

# build/lib would bring modules into the wheel that are there no more. The wheel is built beside what an editable install
# has built in place, and leaves that alone: jobs may be running on it.
$(TF_VENV)/.installed: $(TF_VENV)/.made $(METADATA) $(NATIVE) $(PACKAGED)
	@echo "installing into $(TF_VENV), without PyTorch"
	@rm -rf build/lib build/lib.*
	$(TF_PY) $(PIP_INSTALL) '$(WHEEL)[tensorflow,examples,test]'
	@touch $@

$(JAX_VENV)/.installed: $(JAX_VENV)/.made $(METADATA) build/.extensions $(SAMPLE_SOURCES)
	@echo "installing into $(JAX_VENV), with JAX"
	$(JAX_PY) $(PIP_INSTALL) --editable '.[$(JAX_EXTRAS)]'
	$(JAX_PY) $(PIP_INSTALL) --force-reinstall --no-deps ./$(firstword $(SAMPLES))
	@touch $@

$(INTEGRATIONS_VENV)/.installed: $(INTEGRATIONS_VENV)/.made $(METADATA) build/.extensions
	@echo "installing into $(INTEGRATIONS_VENV): $(INTEGRATIONS)"
	$(INTEGRATIONS_PY) $(PIP_INSTALL) --editable \
	  '.[torch,tensorflow,$(subst $(empty) $(empty),$(comma),$(INTEGRATIONS)),examples,test]'
	$(INTEGRATIONS_PY) -m tools.mend_torchvision
	@touch $@
