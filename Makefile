# Everything runs in .venv, which the first target that needs it makes: Python 3.11 and make are all that must be there.
PYTHON ?= python3.11
BIN := .venv/bin
# Two threads slow down small models.
export OMP_NUM_THREADS ?= 1
# Python keeps the compiled package and the compiled tests. Otherwise each worker and each child process compiles them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage test-slow test-long test-processes test-third-party flower-versions test-cpu test-portable test-fault-injection lint types docs recipes tables zoo benchmarks bench clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -c "import torchvision.ops" || (echo "torch and torchvision do not fit together: remove .venv and install a pair that does, as in https://pytorch.org/get-started" && exit 1)
	touch $@

demo: .venv/ready ## learn ten digits on ten clients, with and without forgetting
	$(BIN)/lightning-fcl demo

test: .venv/ready ## the tests that take less than half a second each: nine of ten, in about four minutes
	$(BIN)/python -m pytest -n 2 -m "not seconds and not slow"

coverage: .venv/ready ## all tests but the slow ones, with the lines that none has run
	$(BIN)/python -m pytest -n 2 -m "not slow and not long" --cov --cov-report=term

test-slow: .venv/ready ## the others, but for those of the next two
	$(BIN)/python -m pytest -n 2 -m "(seconds or slow) and not processes and not long"

test-long: .venv/ready ## before a release: what takes most of a minute, and cases that are much like others
	$(BIN)/python -m pytest -n 2 -m long

test-processes: .venv/ready ## those that mostly wait for processes which they start: more of them at a time than there are cores
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "(seconds or slow) and processes and not long"

# Over .venv, in whose place it has what libraries of others want in other versions; torch and Lightning stay as they are.
ABOVE := .venv-third-party
.venv-third-party/ready: .venv/ready tests/third_party/requirements.txt
	$(BIN)/python -m venv --clear $(ABOVE)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > "$$($(ABOVE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(BIN)/python -m pip freeze | grep -E "^(torch|torchvision|lightning|torchmetrics|numpy)==" > $(ABOVE)/constraints.txt
	$(ABOVE)/bin/python -m pip install --quiet --constraint $(ABOVE)/constraints.txt --requirement tests/third_party/requirements.txt
	touch $@

test-third-party: .venv-third-party/ready ## LightningModules of other libraries in a federation, in an environment of their own
	$(ABOVE)/bin/python -m pytest -m third_party tests/third_party

# Over .venv as well, with the oldest supported Flower. The other tests use the newest.
OLDEST := .venv-flower
.venv-flower/ready: .venv/ready
	$(BIN)/python -m venv --clear $(OLDEST)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > "$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(BIN)/python -m pip freeze | grep -E "^(torch|lightning|torchmetrics|numpy)==" > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --ignore-installed --constraint $(OLDEST)/constraints.txt "flwr==1.41.*"
	touch $@

flower-versions: .venv-flower/ready ## the executor beside a SuperNode, kills included, with the oldest supported Flower
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m flower tests/deployment

# The kernels of torch and MKL for old CPUs, and another number of threads: both change the order of sums. Waiting threads
# must sleep (PASSIVE), because two test processes share the cores.
CPU ?= OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE ATEN_CPU_CAPABILITY=default MKL_CBWR=SSE4_2
ON_CPU ?= rounding and not slow and not long

test-cpu: .venv/ready ## the tests that compare numbers which CPUs round differently, as on another CPU. CPU="MKL_CBWR=AVX2"
	env $(CPU) $(BIN)/python -m pytest -n 2 -m "$(ON_CPU)" tests

test-portable: .venv/ready ## all tests but the slow ones, as on other CPUs, and on the other Pythons that are there
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

docs: .venv/ready ## the documentation in site/html, its notebooks run anew; each warning is an error
	$(BIN)/sphinx-build -M html docs site --fail-on-warning --keep-going --fresh-env

# The folders of recipes/ whose smallest scale is run, the longest first; some need data sets of others.
SMOKE := odfcl fedclip incfed fedvit leaderboard fedclip-hhar flwf analytic flwf-as-written ucihar-reservoir frozen-lite0
smoke-flwf smoke-flwf-as-written smoke-ucihar-reservoir: SMOKE_NEEDS := ucihar
smoke-incfed smoke-fedclip smoke-fedclip-hhar: SMOKE_NEEDS := wesad hhar
smoke-fedvit: SMOKE_NEEDS := tinyimagenet
smoke-odfcl: SMOKE_NEEDS := lfw orl

recipes: .venv/ready ## the smallest run of every recipe (those whose data is there), anew, two at a time
	rm -rf runs/smoke
	$(MAKE) --no-print-directory -j2 -Otarget $(SMOKE:%=smoke-%) smoke-quickstart

# In one process each, as two are run at a time: workers would first import for seconds.
$(SMOKE:%=smoke-%): smoke-%:
	@$(if $(SMOKE_NEEDS),$(BIN)/lightning-fcl data verify $(SMOKE_NEEDS) || { echo "skipped recipes/$*: no data"; exit 0; };) \
	$(BIN)/lightning-fcl reproduce $* --scale smoke --workers 1 --out runs/smoke/$*

smoke-quickstart:
	$(BIN)/lightning-fcl fit --config recipes/quickstart.yaml --out runs/smoke/quickstart

RUNS ?= $(patsubst %/table.json,%,$(wildcard runs/*-paper/table.json runs/*-medium/table.json runs/*-small/table.json))
tables: .venv/ready ## finished tables of runs/ into recipes/, and their pages by them; RUNS=runs/flwf-paper
	$(BIN)/python recipes/make_pages.py $(RUNS)

zoo: .venv/ready ## the networks of zoo/models.yaml, trained by their recipes and published in zoo/; NAMES="mlp.digits.flwf2t_replay"
	$(BIN)/python zoo/train.py $(NAMES)

benchmarks: .venv/ready ## the ratios of benchmarks/README.md; nothing else should run
	$(BIN)/python benchmarks/round_overhead.py
	$(BIN)/python benchmarks/any_module.py
	$(BIN)/python benchmarks/round_memory.py
	$(BIN)/python benchmarks/reservoir.py --out runs/benchmarks
	$(BIN)/python benchmarks/projection.py
	$(BIN)/python benchmarks/attention_step.py
	$(BIN)/python benchmarks/fedvit_step.py
	$(BIN)/python benchmarks/level_with_avalanche.py --out runs/benchmarks

BENCH ?= --write
bench: .venv/ready ## all engines in turns: seconds a round, memory, start-up; nothing else should run. BENCH="--workloads har --repeats 2"
	$(BIN)/python benchmarks/run.py $(BENCH)

clean:
	rm -rf .venv $(ABOVE) $(OLDEST) runs site
