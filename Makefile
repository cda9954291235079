# The one task runner. At most three lines a target: the logic lives in tools/.
#   PYTHON=python3.12 make ...    makes .venv with another interpreter than python3 (3.10 or later)
#   TORCH_INDEX=URL make ...      torch from another index than plain pip's
#   ARGS="..." make demo          options of `recsdk demo`; likewise for test, bench-* and release-*
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-versions test-npu-hardware test-cuda bench-cuda wheelhouse torchrec-matrix lint format docs asan tsan fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv: torch, the three packages from source, all tools
	@$(PYTHON) tools/set_up.py all

demo: ## set up, then train a DLRM on raw ids over two ranks
	@$(PYTHON) tools/set_up.py demo
	@.venv/bin/recsdk demo --output build/demo $(ARGS)

test: ## set up, then run every test; combinatorial ones as a seeded sample
	@$(PYTHON) tools/run_tests.py $(ARGS)

test-full: ## the same with every combination and long runs
	@RECSDK_TEST_PROFILE=full $(PYTHON) tools/run_tests.py $(ARGS)

test-versions: ## plain modules, sharding and pipelines with the older torch and torchrec, in venvs in build/
	@$(PYTHON) tools/older_versions.py $(ARGS)

test-npu-hardware: ## the tests of devices on an Ascend NPU of this machine; needs CANN
	@$(PYTHON) tools/set_up.py cpp
	@.venv/bin/python tools/npu_hardware.py $(ARGS)

lint: ## check style, types, import directions and the tree
	@$(PYTHON) tools/set_up.py all
	@.venv/bin/python tools/lint.py $(ARGS)

format: ## rewrite Python and C++ sources in the project's format
	@$(PYTHON) tools/set_up.py all
	@.venv/bin/python tools/lint.py --fix

docs: ## the site of the documentation, into build/site; links and names are checked
	@$(PYTHON) tools/set_up.py docs
	@.venv/bin/python tools/build_docs.py

SHARDING_SUPPORT = packages/recsdk-sharding/tests/support

torchrec-matrix: ## torchrec's test models with our modules and its own; writes the pages in docs/
	@$(PYTHON) tools/set_up.py all
	@PYTHONPATH=$(SHARDING_SUPPORT):tests/support \
	    .venv/bin/python $(SHARDING_SUPPORT)/torchrec_models/torchrec_matrix.py $(ARGS)

test-cuda: ## the tests of devices, and pipelines, on a CUDA device of this machine; with build/wheelhouse without network
	@$(PYTHON) tools/cuda_hardware.py test $(ARGS)

bench-cuda: ## steps on a CUDA device beside torchrec's and fbgemm's; with build/wheelhouse without network
	@$(PYTHON) tools/cuda_hardware.py bench $(ARGS)

wheelhouse: ## build/wheelhouse, for a machine without network; ARGS="--python 3.12 --torch 2.11"
	@$(PYTHON) tools/set_up.py demo
	@.venv/bin/python tools/wheelhouse.py $(ARGS)

bench-%: ## run a benchmark, as bench-engine; QUICK=1 for a subset
	@$(PYTHON) tools/set_up.py bench
	@.venv/bin/python tools/bench.py $* $(ARGS)

asan: ## C++ tests under the address and undefined-behaviour sanitizers; ARGS="--only index_tests"
	@$(PYTHON) tools/set_up.py cpp
	@.venv/bin/python tools/cpp_tests.py --sanitize address,undefined $(ARGS)

tsan: ## C++ tests under the thread sanitizer
	@$(PYTHON) tools/set_up.py cpp
	@.venv/bin/python tools/cpp_tests.py --sanitize thread $(ARGS)

fuzz: ## run the fuzzers for minutes, as every night; ARGS="--seconds 60 --only row_file"
	@$(PYTHON) tools/set_up.py all
	@.venv/bin/python tools/fuzz.py $(ARGS)

release-%: ## build sdist and wheel of one package: core, sharding or pipeline
	@$(PYTHON) tools/set_up.py all
	@.venv/bin/python tools/release.py $* $(ARGS)

clean: ## remove what was made here: build/, dist/, .venv, caches
	@$(PYTHON) tools/clean.py
