# zerox: everything that a developer runs. `make` lists the targets.
#
# Python: an active virtual environment is used as it is; PYTHON=/path/to/python too if it lies in one.
# Otherwise .venv is made (with PYTHON, or python3) and used; VENV=folder puts it elsewhere. C objects go to
# build/c/<variant>/.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TEST_DEADLINE ?= 120
SLOW_TEST_DEADLINE ?= 360
PYTEST_DEADLINE ?= 3000
PYTEST_ARGS ?=

include tools/flags.mk

ifeq ($(origin PYTHON),file)
VENV := $(or $(VIRTUAL_ENV),.venv)
else
VENV := $(shell '$(PYTHON)' -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else ".venv")')
endif
PY := $(VENV)/bin/python
STAMP := $(VENV)/.zerox-editable

.DEFAULT_GOAL := help
.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "Python: $(PY) (an active virtual environment or PYTHON=... chooses another)"

# ---- Python

$(PY):
	'$(PYTHON)' -m venv '$(VENV)'

# The stamp names the checkout that is installed in this environment; another checkout's does not count.
ifneq ($(shell cat '$(STAMP)' 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): pyproject.toml setup.py | $(PY)
	$(PY) -m pip install -q -e '.[test]'
	@printf '%s' '$(CURDIR)' > '$(STAMP)'

.PHONY: install run test bench proof
install: $(STAMP)  ## the package, editable, with what the tests need; again: compiles only what changed
	@$(PY) setup.py -q build_ext --inplace

run: install  ## the main job: trains a GPT on two processes, saves, reloads, samples (python -m zerox tour)
	$(PY) -m zerox tour

test: test-c install  ## everything that proves the numbers: the C tests, then pytest
	timeout -k 10 $(PYTEST_DEADLINE) $(PY) -m pytest $(PYTEST_ARGS)

bench: install  ## every benchmark; results are printed and added to benchmarks/results/
	@set -e; for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(PY) "$$b"; done

proof: install  ## the long form of every promise: all combinations, where `make test` takes pairs
	timeout -k 10 $(PYTEST_DEADLINE) $(PY) -m pytest -m proof $(PYTEST_ARGS)

# ---- C: a variant is a set of flags with objects and tests of its own

VARIANT ?= plain
FLAGS_plain := $(ZX_OPT) -g
FLAGS_asan := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
FLAGS_tsan := -O1 -g -fno-omit-frame-pointer -fsanitize=thread
# Sanitizers cost a factor of 2 to 6. check.h ends a test a little before the runner does.
DEADLINE := $(if $(filter plain,$(VARIANT)),$(TEST_DEADLINE),$(SLOW_TEST_DEADLINE))
WERROR := $(if $(filter 1,$(ZEROX_WERROR)),-Werror)
OUT := build/c/$(VARIANT)
ARCHIVE := $(OUT)/libzx.a

SKIP := %_cuda.c $(if $(filter x86_64,$(shell uname -m)),,%_avx2.c %_avx512.c)
C_SRC := $(filter-out csrc/py/% $(SKIP),$(sort $(wildcard csrc/*/*.c)))
C_OBJ := $(C_SRC:csrc/%.c=$(OUT)/%.o)
TESTS := $(patsubst tests/c/%.c,%,$(sort $(wildcard tests/c/test_*.c)))
# The thread sanitizer runs the tests of the layers that own threads.
TSAN_LAYERS := model base error memory pool log env timeline threads delay device comm peer local bootstrap store
TESTS_tsan := $(foreach layer,$(TSAN_LAYERS),$(filter test_$(layer)%,$(TESTS)))
TESTS_plain := $(TESTS)
TESTS_asan := $(TESTS)
T_EXE := $(addprefix $(OUT)/tests/,$(sort $(TESTS_$(VARIANT))))

# The BLAS package is needed for its header only, so the C side builds while the package does not.
BLAS := build/c/blas-include
$(BLAS): | $(PY)
	@mkdir -p $(@D)
	@$(PY) tools/openblas.py include > $@.tmp 2>/dev/null || \
	    { $(PY) -m pip install -q scipy-openblas32 && $(PY) tools/openblas.py include > $@.tmp; }
	@mv $@.tmp $@

COMPILE = $(CC) $(ZX_CFLAGS) $(FLAGS_$(VARIANT)) $(ZX_WARN) $(WERROR) $(CFLAGS) -Icsrc \
	-isystem "$$(cat $(BLAS))" \
	$(if $(filter %_avx2.c,$<),$(ZX_AVX2)) $(if $(filter %_avx512.c,$<),$(ZX_AVX512)) -MMD -MP

$(OUT)/%.o: csrc/%.c tools/flags.mk Makefile | $(BLAS)
	@mkdir -p $(@D)
	@echo "  $(VARIANT) $<"
	@$(COMPILE) -c $< -o $@

# Made anew: an archive that is only added to keeps the objects of deleted files.
$(ARCHIVE): $(C_OBJ)
	@rm -f $@
	@ar rcs $@ $^

$(OUT)/tests/%: tests/c/%.c $(ARCHIVE) tools/flags.mk Makefile | $(BLAS)
	@mkdir -p $(@D)
	@echo "  $(VARIANT) $<"
	@$(COMPILE) -Itests/c -MF $@.d $< $(ARCHIVE) $(ZX_LIBS) -o $@

-include $(C_OBJ:.o=.d) $(T_EXE:=.d)

export ASAN_OPTIONS := detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS := print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1
# The thread sanitizer of older compilers cannot start where addresses are randomised over more than 28 bits.
FIXED_tsan := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: c-archive c-tests c-run test-c asan tsan
c-archive: $(ARCHIVE)
c-tests: $(T_EXE)
c-run:
	@[ -n "$(T_EXE)" ] || { echo "C tests, $(VARIANT): none found in tests/c"; exit 1; }
	@export CHECK_DEADLINE=$$(($(DEADLINE) - 5)); \
	export ZEROX_BLAS="$${ZEROX_BLAS-$$($(PY) tools/openblas.py lib)}"; failed=; \
	for t in $(T_EXE); do \
	    echo "== $$t"; \
	    $(FIXED_$(VARIANT)) timeout -k 5 $(DEADLINE) $$t; rc=$$?; \
	    if [ $$rc = 124 ]; then echo "$$t: no end within $(DEADLINE) s"; fi; \
	    if [ $$rc != 0 ]; then failed="$$failed $$t(exit $$rc)"; fi; \
	done; \
	if [ -n "$$failed" ]; then echo "C tests, $(VARIANT): FAILED:$$failed"; exit 1; fi; \
	echo "C tests, $(VARIANT): all $(words $(T_EXE)) passed"

# The jobserver of an outer make -j is used if there is one.
define c_suite
@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS)) VARIANT=$(1) c-tests
@$(MAKE) --no-print-directory VARIANT=$(1) c-run
endef

test-c:  ## the C tests (each ends within TEST_DEADLINE=120 seconds)
	$(call c_suite,plain)
asan:  ## the C tests under the address and undefined-behaviour sanitizers
	$(call c_suite,asan)
tsan:  ## the C tests of base, device, comm and store under the thread sanitizer
	$(call c_suite,tsan)

# ---- checks and cleaning

.PHONY: lint format clean
lint: $(STAMP)  ## ruff, include directions, style, linkage names
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS)) VARIANT=plain c-archive
	@rc=0; for check in "-m ruff check" "-m ruff format --check" tools/check_includes.py \
	    "tools/check_style.py --archive build/c/plain/libzx.a"; do \
	    echo "$(PY) $$check"; $(PY) $$check || rc=1; \
	done; exit $$rc

# make format FILES="csrc/base/*.c" formats some; Python files go to ruff, all others to clang-format.
FILES ?= $(shell git ls-files '*.py' '*.pyi' 'csrc/*.[ch]' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.[ch]')
format: $(STAMP)  ## clang-format and ruff format, over everything or FILES="..."
	@$(PY) -m pip install -q 'clang-format>=18'
	$(if $(filter %.py %.pyi,$(FILES)),$(PY) -m ruff format $(filter %.py %.pyi,$(FILES)))
	$(if $(filter-out %.py %.pyi,$(FILES)),$(VENV)/bin/clang-format -i $(filter-out %.py %.pyi,$(FILES)))

clean:  ## what was built; .venv and runs/ stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis python/*.egg-info python/zerox/*.so
