# Python 3.11 and make are required. The first target that needs .venv creates it.
PYTHON ?= python3.11
BIN := .venv/bin
# Use one thread, because two threads slow down small models.
export OMP_NUM_THREADS ?= 1
# Keep compiled Python files. Otherwise each worker and each child process compiles the package and the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage test-slow test-long test-processes test-third-party flower-versions test-cpu test-portable test-fault-injection lint types docs recipes tables zoo benchmarks bench clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -c "import torchvision.ops" || (echo "torch and torchvision have incompatible versions. Remove .venv and install matching versions: https://pytorch.org/get-started" && exit 1)
	touch $@

demo: .venv/ready ## train ten clients on digits, with and without methods against forgetting
	$(BIN)/lightning-fcl demo

test: .venv/ready ## tests that take less than 0.5 s each, in about four minutes
	$(BIN)/python -m pytest -n 2 -m "not seconds and not slow"

coverage: .venv/ready ## all tests except those marked slow or long; list the lines that no test runs
	$(BIN)/python -m pytest -n 2 -m "not slow and not long" --cov --cov-report=term

test-slow: .venv/ready ## tests marked seconds or slow, except those marked processes or long
	$(BIN)/python -m pytest -n 2 -m "(seconds or slow) and not processes and not long"

test-long: .venv/ready ## before a release: tests of about a minute, and variants of other tests
	$(BIN)/python -m pytest -n 2 -m long

test-processes: .venv/ready ## tests that wait for processes they start, four at a time
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "(seconds or slow) and processes and not long"

# An environment on top of .venv, for libraries that need other versions of some packages. torch and Lightning keep their
# versions.
ABOVE := .venv-third-party
.venv-third-party/ready: .venv/ready tests/third_party/requirements.txt
	$(BIN)/python -m venv --clear $(ABOVE)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > "$$($(ABOVE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(BIN)/python -m pip freeze | grep -E "^(torch|torchvision|lightning|torchmetrics|numpy)==" > $(ABOVE)/constraints.txt
	$(ABOVE)/bin/python -m pip install --quiet --constraint $(ABOVE)/constraints.txt --requirement tests/third_party/requirements.txt
	touch $@

test-third-party: .venv-third-party/ready ## tests with LightningModules and data of other libraries, in a separate environment
	$(ABOVE)/bin/python -m pytest -m third_party tests/third_party

# An environment on top of .venv with the oldest supported Flower. All other tests use the newest supported Flower.
OLDEST := .venv-flower
.venv-flower/ready: .venv/ready
	$(BIN)/python -m venv --clear $(OLDEST)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > "$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(BIN)/python -m pip freeze | grep -E "^(torch|lightning|torchmetrics|numpy)==" > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --ignore-installed --constraint $(OLDEST)/constraints.txt "flwr==1.41.*"
	touch $@

flower-versions: .venv-flower/ready ## deployment tests with the oldest supported Flower
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m flower tests/deployment

# Kernels of torch and MKL for old CPUs, and another number of threads. Both change the order of sums. Waiting threads must
# sleep (PASSIVE), because two test processes share the cores.
CPU ?= OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE ATEN_CPU_CAPABILITY=default MKL_CBWR=SSE4_2
ON_CPU ?= rounding and not slow and not long

test-cpu: .venv/ready ## tests marked rounding, with the code paths of an old CPU; for another CPU: CPU="MKL_CBWR=AVX2"
	env $(CPU) $(BIN)/python -m pytest -n 2 -m "$(ON_CPU)" tests

test-portable: .venv/ready ## tests except those marked slow or long, with other CPU code paths and other Python versions
	$(BIN)/tox run

ARGS ?= --processes 2 --write docs/reliability.md
test-fault-injection: .venv/ready ## kills, full disks, damaged files, mutated recipes; ARGS="--seed 7 --cases kills=10 --minutes 5"
	$(BIN)/python tests/reliability/run.py $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/ready
	$(BIN)/mypy

docs: .venv/ready ## build the documentation in site/html and run its notebooks; warnings are errors
	$(BIN)/sphinx-build -M html docs site --fail-on-warning --keep-going --fresh-env

# Folders of recipes/ whose smallest scale is run. Folders with longer runs come first. SMOKE_NEEDS: the datasets that a
# folder needs.
SMOKE := odfcl fedclip incfed fedvit leaderboard fedclip-hhar flwf analytic flwf-as-written ucihar-reservoir frozen-lite0
smoke-flwf smoke-flwf-as-written smoke-ucihar-reservoir: SMOKE_NEEDS := ucihar
smoke-incfed smoke-fedclip smoke-fedclip-hhar: SMOKE_NEEDS := wesad hhar
smoke-fedvit: SMOKE_NEEDS := tinyimagenet
smoke-odfcl: SMOKE_NEEDS := lfw orl

recipes: .venv/ready ## the smallest run of each recipe with available data, two at a time
	rm -rf runs/smoke
	$(MAKE) --no-print-directory -j2 -Otarget $(SMOKE:%=smoke-%) smoke-quickstart smoke-quickstart-private

# Each run uses one process (--workers 1), because two runs are executed at a time.
$(SMOKE:%=smoke-%): smoke-%:
	@$(if $(SMOKE_NEEDS),$(BIN)/lightning-fcl data verify $(SMOKE_NEEDS) || { echo "Skipped recipes/$*: missing data."; exit 0; };) \
	$(BIN)/lightning-fcl reproduce $* --scale smoke --workers 1 --out runs/smoke/$*

smoke-quickstart smoke-quickstart-private: smoke-%:
	$(BIN)/lightning-fcl fit --config recipes/$*.yaml --out runs/smoke/$*

RUNS ?= $(patsubst %/table.json,%,$(wildcard runs/*-paper/table.json runs/*-medium/table.json runs/*-small/table.json))
tables: .venv/ready ## copy finished tables of runs/ to recipes/ and update their pages; RUNS=runs/flwf-paper
	$(BIN)/python recipes/make_pages.py $(RUNS)

zoo: .venv/ready ## train and publish the networks of zoo/models.yaml; NAMES="mlp.digits.flwf2t_replay"
	$(BIN)/python zoo/train.py $(NAMES)

benchmarks: .venv/ready ## ratios of benchmarks/README.md; run nothing else meanwhile
	$(BIN)/python benchmarks/round_overhead.py
	$(BIN)/python benchmarks/any_module.py
	$(BIN)/python benchmarks/round_memory.py
	$(BIN)/python benchmarks/reservoir.py --out runs/benchmarks
	$(BIN)/python benchmarks/projection.py
	$(BIN)/python benchmarks/attention_step.py
	$(BIN)/python benchmarks/fedvit_step.py
	$(BIN)/python benchmarks/level_with_avalanche.py --out runs/benchmarks

BENCH ?= --write
bench: .venv/ready ## seconds per round, memory and start-up of all engines; run nothing else meanwhile. BENCH="--workloads har --repeats 2"
	$(BIN)/python benchmarks/run.py $(BENCH)

clean:
	rm -rf .venv $(ABOVE) $(OLDEST) runs site
