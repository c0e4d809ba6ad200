# Owns the commands: each one makes what it needs, so that any of them works in a fresh clone.

PYTHON ?= python3
# Installed only where the environment has no torch yet.
TORCH ?= torch==2.13.0
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
PY := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=

# The sources that know nothing of torch; everything here also runs under the sanitizers.
PURE_SOURCES := $(wildcard csrc/base/*.cpp) \
	$(filter-out csrc/transport/c10d_store.cpp,$(wildcard csrc/transport/*.cpp)) \
	$(wildcard csrc/collective/*.cpp csrc/collective/device_kernels/*.cpp) \
	$(wildcard csrc/bucket/copy_tiles.cpp csrc/bucket/device_pack.cpp csrc/bucket/host_round.cpp) \
	$(wildcard csrc/bucket/layout.cpp csrc/bucket/ordered_round.cpp csrc/bucket/pack.cpp csrc/bucket/shared_round.cpp) \
	$(addprefix csrc/pipeline/,action.cpp arena_blocks.cpp builders.cpp builders_forward.cpp \
	  builders_looped.cpp \
	  builders_v.cpp builders_zero_bubble.cpp csv.cpp grid.cpp lowering.cpp readiness.cpp \
	  schedule.cpp search.cpp search_problem.cpp simulator.cpp state_search.cpp \
	  validator.cpp waiting_cycle.cpp)
CPP_TESTS := $(wildcard tests/cpp/*_test.cpp)

BUILT_FROM := setup.py pyproject.toml $(shell find csrc build_backend -type f 2>/dev/null)

# torch's build takes the compiler as one word: a folder of links makes g++ mean ccache.
CCACHE := $(shell command -v ccache)
ifneq ($(CCACHE),)
export PATH := $(CURDIR)/build/ccache:$(PATH)
CCACHE_LINKS := build/ccache/g++
endif

.PHONY: help venv demo iproute2 test test-all bench lint format cpp-test cpp-test-aarch64 cuda-check clean

help:
	@echo "make demo       train a small GPT five ways and compare"
	@echo "make test       the tests; test-all: the slow ones and the aarch64 run too"
	@echo "make bench      the benchmarks"
	@echo "make lint       ruff, mypy, clang-format; format: apply them"
	@echo "make cpp-test   the C++ tests under the sanitizers"
	@echo "make cuda-check build for CUDA, and check what comes out as far as that goes without a GPU"

build/ccache/g++:
	@mkdir -p build/ccache
	@for name in gcc g++ cc c++; do ln -sf $(CCACHE) build/ccache/$$name; done

$(VENV)/bin/python:
	@echo "making the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "python3 needs its venv module (Debian: apt-get \
	install python3-venv)"; rm -rf $(VENV); exit 1; }

# numpy before torch is imported for the first time: torch warns without it.
$(VENV)/.torch: | $(VENV)/bin/python
	@$(PY) -c "import torch" 2>/dev/null || { echo "installing $(TORCH) ..."; \
	  $(PIP) install "$(TORCH)" numpy; }
	@echo "installing the build's tools ..."
	@$(PIP) install "setuptools>=77" ninja
	@touch $@

$(VENV)/.built: $(BUILT_FROM) $(VENV)/.torch | $(CCACHE_LINKS)
	@echo "building pydist, and installing what its tests, demo and benchmarks need ..."
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) install --no-build-isolation \
	  -e ".[demo,test,bench,dev]"
	@touch $@

venv: $(VENV)/.built

demo: venv
	$(PY) examples/train_gpt.py $(DEMO_ARGS)

# For tests and benchmarks of several hosts: network namespaces, which take root.
iproute2:
	@command -v ip >/dev/null && command -v tc >/dev/null || { [ "$$(id -u)" != 0 ] || { \
	  echo "installing iproute2, for networks of several hosts ..."; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
	    --no-install-recommends iproute2 >/dev/null; }; }

test: venv iproute2
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

# Real frameworks, with the torch that is there.
$(VENV)/.interop: tests/interop/requirements.txt | $(VENV)/.built
	@echo "installing the frameworks that tests/interop trains with ..."
	@$(PIP) install -r $<
	@touch $@

test-all: $(VENV)/.interop iproute2 cpp-test cpp-test-aarch64
	$(PY) -m pytest $(PYTEST_ARGS)

bench: venv iproute2
	$(PY) -m bench $(BENCH_ARGS)

CXX_FILES = $(shell find csrc tests -name "*.h" -o -name "*.cpp" -o -name "*.inl" -o -name "*.cu" -o -name "*.cuh")
LINTED = $(wildcard setup.py build_backend pydist tests bench examples)

lint: venv
	$(PY) -m ruff check $(LINTED)
	$(PY) -m ruff format --check $(LINTED)
	$(PY) -m mypy --strict pydist pydist_backend.py bench
	MYPYPATH=examples $(PY) -m mypy --strict examples
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: venv
	$(PY) -m ruff check --fix $(LINTED)
	$(PY) -m ruff format $(LINTED)
	$(VENV)/bin/clang-format -i $(CXX_FILES)

# One program per test file and sanitizer, each linked with the pure sources.
CPP_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -Icsrc -pthread
BUILDS := asan tsan aarch64
asan_CXX := g++
asan_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
tsan_CXX := g++
# It does not model the fence in Board::ring(), which orders a flag against a look at who sleeps: no data.
tsan_FLAGS := -fsanitize=thread -Wno-tsan
aarch64_CXX := aarch64-linux-gnu-g++
aarch64_FLAGS := -static
export ASAN_OPTIONS ?= detect_leaks=1
export TSAN_OPTIONS ?= halt_on_error=1 second_deadlock_stack=1

define cpp_build
build-cpp/$(1)/%.o: %.cpp
	@mkdir -p $$(dir $$@)
	@echo "$(1) $$<"
	@$$($(1)_CXX) $(CPP_FLAGS) $$($(1)_FLAGS) -MMD -MP -c $$< -o $$@

build-cpp/$(1)/libpydist.a: $(PURE_SOURCES:%.cpp=build-cpp/$(1)/%.o)
	@rm -f $$@
	@ar rcs $$@ $$^

build-cpp/$(1)/%_test: build-cpp/$(1)/tests/cpp/%_test.o build-cpp/$(1)/libpydist.a
	@$$($(1)_CXX) $(CPP_FLAGS) $$($(1)_FLAGS) $$< -Wl,--whole-archive build-cpp/$(1)/libpydist.a \
	  -Wl,--no-whole-archive -o $$@

.PHONY: cpp-build-$(1)
cpp-build-$(1): $(CPP_TESTS:tests/cpp/%.cpp=build-cpp/$(1)/%)
-include $(patsubst %.cpp,build-cpp/$(1)/%.d,$(PURE_SOURCES) $(CPP_TESTS))
endef
$(foreach build,$(BUILDS),$(eval $(call cpp_build,$(build))))
.SECONDARY:

# ThreadSanitizer cannot start under some kernels' address randomisation, so it runs without it
# where that may be switched off.
RUN_asan :=
RUN_tsan := $(shell setarch -R true 2>/dev/null && echo setarch -R)
RUN_aarch64 := qemu-aarch64-static

define cpp_run
	@set -e; for test in $(CPP_TESTS:tests/cpp/%.cpp=%); do \
	  echo "$(1): running $$test"; timeout 300 $(RUN_$(1)) build-cpp/$(1)/$$test; done
endef

cpp-test: | $(CCACHE_LINKS)
	@$(MAKE) --no-print-directory -j$$(nproc) cpp-build-asan cpp-build-tsan
	$(call cpp_run,asan)
	$(call cpp_run,tsan)
	@echo "cpp-test: all passed"

cpp-test-aarch64: | $(CCACHE_LINKS)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || \
	  { if [ "$$(id -u)" = 0 ]; then echo "installing the aarch64 compiler and emulator ..."; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
	      --no-install-recommends g++-aarch64-linux-gnu qemu-user-static >/dev/null; \
	  else echo "cpp-test-aarch64 needs g++-aarch64-linux-gnu and qemu-user-static"; exit 1; fi; }
	@$(MAKE) --no-print-directory -j$$(nproc) cpp-build-aarch64
	$(call cpp_run,aarch64)
	@echo "cpp-test-aarch64: all passed"

$(CUDA_VENV)/.installed: tests/cuda/requirements.txt
	@echo "making the environment $(CUDA_VENV): torch for CUDA, NCCL and nvcc, 5 GB ..."
	@rm -rf $(CUDA_VENV)
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r $<
	@touch $@

cuda-check: $(CUDA_VENV)/.installed | $(CCACHE_LINKS)
	@PATH="$(CURDIR)/$(CUDA_VENV)/bin:$$PATH" $(CUDA_VENV)/bin/python tests/cuda/check.py

clean:
	rm -rf build build-cpp dist *.egg-info pydist/*.so pydist/_build_info.py
