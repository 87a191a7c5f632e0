# Every target makes its own virtual environment; a bare machine needs Python 3.11 or later and PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSIONS := 5.18.0 5.20.2 5.24.0
WORKERS ?= 2
N ?= 2000

.PHONY: quickstart test lint setup-demo test-versions fuzz clean

quickstart: setup-demo
	$(BIN)/python examples/quickstart.py

test: lint setup-demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup-demo: $(VENV)/.base
	$(BIN)/hf-dspark setup-demo

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[gguf]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,demo,gguf,eval,triton]"
	touch $@

# N random cases against plain generate(); SEED starts where another run began.
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --cases $(N) $(if $(SEED),--seed $(SEED))

# The tests that need no embedded pair, on the oldest, a middle and the newest supported transformers.
test-versions: $(VERSIONS:%=test-transformers-%)

test-transformers-%: .venvs/%/.installed
	OMP_NUM_THREADS=1 .venvs/$*/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow"

.PRECIOUS: .venvs/%/.installed
.venvs/%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venvs/$*
	grep -v "^transformers==" constraints.txt > .venvs/$*/constraints.txt
	.venvs/$*/bin/python -m pip install --quiet -c .venvs/$*/constraints.txt "transformers==$*" -e ".[dev,demo,gguf,eval,triton]"
	touch $@

clean:
	rm -rf $(VENV) .venvs
