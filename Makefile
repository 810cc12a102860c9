# One command each; every one makes the environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt
TEST_PROCESSES ?= 4
DEMO_FLAGS ?=
GPU_FLAGS ?=
# With the torch that is there: a Python that was asked for, else the environment's, if it exists.
GPU_PYTHON ?= $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON)))
DEMO_OUTPUT ?= demo
# Packages are compiled as they are imported; with this set, anew in every process.
unexport PYTHONDONTWRITEBYTECODE

FAULTS_FLAGS ?= --all
# Installing compiles them.
KERNELS := hatch_build.py $(wildcard $(addprefix src/rankscope/gradients/kernels/,build.py *.[ch]))

FUZZ_FLAGS ?=
EAGER_FLAGS ?= tests/scope tests/wrappers tests/evidence tests/integrations tests/reduce
MUTANTS_FLAGS ?=

.PHONY: demo test eager check bench faults mutants fuzz field chaos gpu docs packaging format clean

demo: $(VENV)/.study ## a forgotten sampler, then the paper's experiment: minutes on 2 cores
	$(BIN)/rankscope demo --output $(DEMO_OUTPUT)-two-runs --overwrite
	$(BIN)/rankscope study --output $(DEMO_OUTPUT) --overwrite $(DEMO_FLAGS)

test: $(VENV)/.dev $(VENV)/.s3 ## all tests, in parallel
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 40

eager: $(VENV)/.dev $(VENV)/.s3 ## tests on real ranks, with all that comes due late due in the first 30 steps
	RANKSCOPE_EAGER=1 $(BIN)/python -m pytest -m ranks --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --timeout 900 $(EAGER_FLAGS)

check: $(VENV)/.dev ## format, lint, strict types, import contract
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## ratios measured side by side in one run
	$(BIN)/python benchmarks/bench.py

faults: $(VENV)/.dev ## faults and healthy look-alikes in real trainings: what is found, in twenty minutes
	$(BIN)/python -m benchmarks.faults $(FAULTS_FLAGS)

mutants: $(VENV)/.dev $(VENV)/.s3 ## 400 small faults in rankscope's own code: which of them its tests notice
	$(BIN)/python benchmarks/mutants.py $(MUTANTS_FLAGS)

fuzz: $(VENV)/.dev ## 10,000 damaged runs, studies, bundles, data files and plans, read as commands do
	PYTHONPATH=tests $(BIN)/python benchmarks/fuzz.py $(FUZZ_FLAGS)

field: $(VENV)/.dev ## scripts of other packages, plain and watched: half an hour
	$(PIP_INSTALL) peft sentence-transformers torchtitan==0.2.2
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/timm timm torchvision==0.28.*  # others' imports fail with it
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/torchao torchao
	$(BIN)/python benchmarks/field.py --write

chaos: $(VENV)/.dev ## accidents around small trainings, hundreds of them: twenty minutes
	$(BIN)/python benchmarks/chaos.py --write

gpu: ## what only a machine with an accelerator can tell; GPU_FLAGS=--dry-run tries it without
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_FLAGS)

docs: $(VENV)/.docs ## the documentation site, in site/, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

packaging: $(VENV)/.dev ## the wheel in empty environments, without and with each extra
	$(BIN)/python .ci/packaging

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) $(DEMO_OUTPUT) $(DEMO_OUTPUT)-two-runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version, so that no other package chooses a build of it.
$(VENV)/.torch: $(VENV)/pyvenv.cfg constraints.txt
	$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.study: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(PIP_INSTALL) --editable '.[study]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(PIP_INSTALL) --editable '.[dev]'
	$(PIP_INSTALL) --no-deps 'megatron-core==0.16.1; python_version < "3.14"'  # else its tests skip
	touch $@ $(VENV)/.study $(VENV)/.docs # which are parts of it

# An S3 server, whose packages nothing else needs.
$(VENV)/.s3: $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade \
		--target $(VENV)/s3 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5
	touch $@
