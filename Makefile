# Every target sets up what it needs; `make help` lists them.
#   make release                                      the embedded tiny model
#   make release CONFIG=config/gemma-4-e2b.yaml       another model
#   make release JOBS=4 SNAKEMAKE_FLAGS=--dry-run     four cores instead of all, extra flags

PYTHON ?= python3
JOBS ?= all
CONFIG ?=
SNAKEMAKE_FLAGS ?=

ENV := .venv
PINS := envs/requirements.txt
STATE := $(ENV)/pins.state
# Files of tests side by side; each worker makes the shared fixtures for itself, so more than four gain nothing.
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
RUN := PATH="$(CURDIR)/$(ENV)/bin:$$PATH" "$(CURDIR)/$(ENV)/bin/python"
SNAKEMAKE := $(RUN) -m snakemake --cores $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help release report test test-unit test-models lint clean environment check-host

help:
	@echo "make release      build and gate the release folders [CONFIG=config/NAME.yaml]"
	@echo "make plan         what a release would take: jobs, bytes, memory, time [CONFIG=config/NAME.yaml]"
	@echo "make report       one HTML page about the release [CONFIG=config/NAME.yaml]"
	@echo "make test         all tests"
	@echo "make test-unit    the tests that take seconds"
	@echo "make test-models  the whole release of the second embedded model (minutes)"
	@echo "make test-coreml  the tests of the Core ML reference, whose packages it adds to $(ENV)"
	@echo "make lint         ruff, snakefmt, snakemake --lint"
	@echo "make reproduce    two clean builds under different settings give the same bytes (minutes)"
	@echo "make bench        what the Metal kernels read; quantizer, tables, saving and gates beside baselines; what a rebuild costs (minutes)"
	@echo "make mutants      would the gates notice? single faults, each in a copy of the project (minutes) [MUTANTS=\"--layer model\"]"
	@echo "make test-cluster a release built by two Slurm nodes on this machine, one of them lost (Linux, root; minutes) [CONFIG=config/NAME.yaml]"
	@echo "make doctor       what works on this host and what will not"
	@echo "make environment  the pinned packages in $(ENV)"
	@echo "make environment-coreml  the same with what the Core ML reference needs"
	@echo "make clean        delete everything built (results/) and all caches; $(ENV) stays"

release: environment
	@$(SNAKEMAKE) release $(if $(CONFIG),--configfile "$(CONFIG)") $(SNAKEMAKE_FLAGS)

.PHONY: plan
plan: environment
	@$(SNAKEMAKE) plan --quiet $(if $(CONFIG),--configfile "$(CONFIG)") $(SNAKEMAKE_FLAGS)

report: environment
	@$(SNAKEMAKE) report $(if $(CONFIG),--configfile "$(CONFIG)") $(SNAKEMAKE_FLAGS)

test: environment
	@$(RUN) $(PYTEST) -m "not other_model and not cluster"

test-models: environment
	@$(RUN) $(PYTEST) -m other_model

# The tests of closures see the stages of the extra only where it is installed.
.PHONY: test-coreml environment-coreml
test-coreml: environment-coreml
	@$(RUN) -m pytest tests/test_coreml.py tests/test_closure.py tests/test_environment.py

environment-coreml: environment
	@$(ENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r $(PINS) -r envs/coreml.txt

test-unit: environment
	@$(RUN) $(PYTEST) -m "not end_to_end and not cluster"

lint: environment
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m snakefmt --check Snakefile rules
	@$(SNAKEMAKE) --lint

.PHONY: reproduce bench
reproduce: environment
	@$(RUN) -m workflow_scripts.checks.reproduce

bench: environment
	@$(RUN) -m workflow_scripts.checks.bench

.PHONY: mutants
mutants: environment
	@$(RUN) -m workflow_scripts.checks.mutants $(MUTANTS)

# The executors go into $(ENV), beside the pins and without moving them.
.PHONY: test-cluster
test-cluster: environment
	@$(RUN) -m pip install -qq --no-compile --disable-pip-version-check -c $(PINS) -r envs/cluster.txt
	@$(RUN) -m workflow_scripts.checks.cluster $(if $(CONFIG),--config "$(CONFIG)")
	@$(RUN) -m pytest tests/test_profiles.py tests/test_cluster.py

.PHONY: doctor
doctor: environment
	@$(RUN) -m workflow_scripts doctor

clean:
	rm -rf results .snakemake .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(ENV)/*" -prune -exec rm -rf {} +

# The state file holds the digest of the pins once they are installed, and `installing PID` until then: so an
# install that was killed is started afresh, a second make waits for no half environment, and new pins are laid
# over a whole environment, which takes seconds.
environment: check-host
	@pins=$$("$(PYTHON)" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' $(PINS)); \
	state=$$(cat $(STATE) 2>/dev/null || true); \
	if [ "$$state" = "$$pins" ]; then exit 0; fi; \
	case "$$state" in "installing "*) \
		if kill -0 "$${state#installing }" 2>/dev/null; then \
			echo "error: another make (process $${state#installing }) is installing $(ENV); wait for it" >&2; exit 1; \
		fi; \
		rm -rf $(ENV);; \
	esac; \
	if ! $(ENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then rm -rf $(ENV); fi; \
	mkdir -p $(ENV); \
	echo "installing $$$$" > $(STATE); \
	echo "installing the pinned packages into $(ENV) (one to three minutes, once)" >&2; \
	{ [ -x $(ENV)/bin/python ] || "$(PYTHON)" -m venv $(ENV); } \
	&& $(ENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r $(PINS) \
	&& echo "$$pins" > $(STATE)

check-host:
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not Python 3.11 to 3.14. Install one (macOS: brew install python@3.13; Debian, Ubuntu: apt install python3 python3-venv) and name it: make ... PYTHON=python3.13" >&2; exit 1; }
	@for compiler in "$$CXX" c++ g++ clang++; do \
		[ -n "$$compiler" ] && command -v "$$compiler" >/dev/null && exit 0; \
	done; \
	echo "error: no C++ compiler (c++, g++, clang++). Install one: macOS: xcode-select --install; Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++" >&2; exit 1

# Generated, so that `snakemake --sdm conda` gets the same pins: Snakemake copies the file elsewhere, where a
# reference to requirements.txt would not resolve.
envs/pipeline.yaml: $(PINS)
envs/coreml.yaml: $(PINS) envs/coreml.txt
envs/pipeline.yaml envs/coreml.yaml:
	@{ \
		echo "# Generated from $(notdir $^) by \`make $@\`; edit that file."; \
		printf 'channels:\n  - conda-forge\n  - nodefaults\ndependencies:\n'; \
		printf '  - python=3.11\n  - cxx-compiler\n  - pip\n  - pip:\n'; \
		sed -n 's/^\([A-Za-z0-9].*==.*\)$$/      - \1/p' $^; \
	} > $@
