# make demo: the main job on a real model. make test: everything. make check: linters and types.
SHELL := /bin/bash
TORCH ?= 2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.mctl-torch-$(TORCH)

.PHONY: all env check format test demo native clean

all: env native

env: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q torch==$(TORCH)
	$(BIN)/python .ci/requirements | xargs -d '\n' $(BIN)/python -m pip install -q torch==$(TORCH)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	rm -f $(VENV)/.mctl-torch-*
	touch $@

native: env
	$(BIN)/python -c "from mctl.runner.native import find_runner; print(find_runner(print))"

demo: env native
	PATH="$(CURDIR)/$(BIN):$$PATH" bash samples/demo.sh build/demo

test: env native
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p build/mypy && ln -sfn ../.. build/mypy/mctl
	cd build/mypy && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p mctl
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cc' '*.h')

format: env
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.h')

clean:
	rm -rf build dist *.egg-info
