# `make demo` and `make test` need nothing but Python 3.11 or newer, git and make: they do their own set-up.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test soak lint clean help

help:
	@echo "make demo    train a small model on this computer's own Python library, then let it write"
	@echo "make test    run the test suite"
	@echo "make soak    run what takes long: many kills, long fuzzing"
	@echo "make lint    ruff and mypy"

demo: $(READY)
	$(BIN)/python train.py configs/demo.yaml --resume
	$(BIN)/python generate.py runs/demo --prompt "def " --samples 3 --max-new-tokens 200

test: $(READY)
	$(BIN)/python -m pytest -m "not soak" --numprocesses auto --maxprocesses 4

soak: $(READY)
	$(BIN)/python -m pytest -m soak

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ropelab needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1): name another, make PYTHON=python3.12 demo"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "this Python has no venv: install its package, on Debian and Ubuntu: sudo apt install python3-venv"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(READY)

clean:
	rm -rf .venv build *.egg-info
