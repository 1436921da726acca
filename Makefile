# The commands of the project. Each does its own set-up: a virtual environment in .venv with the versions of
# constraints.txt, and the native build. Needed beforehand: Python >= 3.11, a C++17 compiler, make.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
LOG := build/setup.log
JOBS ?= 2
RESULTS ?= benchmarks/results
VLLM ?= build/vllm
# The release of transformers that is supported beside that of constraints.txt
OLDER := 5.23.0
# Many tests and benchmarks are processes of their own: without bytecode each would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE
CSRC := $(shell find allocator/csrc tests/native tests/simgpu/device -name '*.cpp' -o -name '*.h' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-cuda test-ray test-release test-versions test-vllm mutants build check format sanitize soak kills bench figures gpu docs wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build  ## the same answer with less and less memory; draws build/demo.png
	@$(PY) examples/demo.py

test: check  ## static checks, then every test that this machine can run; CHAOS=SEED those whose results must not depend on where pages are, while pages move
	@$(if $(CHAOS),BALLONET_CHAOS=$(CHAOS)) $(PY) -m pytest -n $(JOBS) --dist worksteal

test-cuda: build  ## the tests that need a GPU, on a simulated one under torch's CUDA build (530 MB, fetched once); QUICK=1, TORCH=2.15.0, DELAY=50 SEED=1
	@$(PY) tests/simgpu/run.py --jobs $(JOBS) $(if $(QUICK),--quick) $(if $(TORCH),--torch $(TORCH)) $(if $(DELAY),--delay $(DELAY)) $(if $(SEED),--seed $(SEED))

test-vllm: build $(VLLM)/.ready  ## the vLLM connector under vLLM's CPU build, in an environment of its own (fetched once, 700 MB)
	@BALLONET_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PY) -m pytest -n 0 tests/vllm

test-ray: build  ## replicas on a real Ray (fetched once, 79 MB), which `make test` leaves out where there is none
	@$(call extra,ray,replicas)
	@$(PY) -m pytest -n 0 tests/replicas/test_ray.py

test-versions: build build/transformers-$(OLDER)/.ready  ## every test on both supported releases of transformers
	@$(PY) -m pytest -n $(JOBS) --dist worksteal
	@PYTHONPATH=$(CURDIR)/build/transformers-$(OLDER) $(PY) -m pytest -n $(JOBS) --dist worksteal

test-release: build  ## the sdist and the wheel, each installed and used in a fresh environment, with a compiler and without
	@$(call extra,auditwheel,release)
	@BALLONET_RELEASE=1 $(PY) -m pytest -q -n 0 tests/test_release.py

mutants: build  ## plants the bugs of tests/mutants one after the other, and runs the tests that should find each; NAMES="kv fence-wait ...", HOST=1 without those that need a simulated GPU; POLICY=admission those that mutmut makes in offload/policy/admission.py, all in minutes to hours
ifdef POLICY
	@$(call extra,mutmut,mutants)
	@PYTHONPATH=src $(VENV)/bin/mutmut run "ballonet.offload.policy.$(POLICY)*"
	@PYTHONPATH=src $(VENV)/bin/mutmut results
else
	@$(PY) tests/mutants/run.py $(if $(HOST),--host) $(NAMES)
endif

build: $(VENV)/.ready  ## the environment and the native core, in place
	@$(PY) setup.py -q build_ext --inplace

check: build  ## ruff, mypy, import-linter, clang-format
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@PYTHONPATH=src $(VENV)/bin/lint-imports --cache-dir build/imports >build/imports.log || { cat build/imports.log; exit 1; }
	@$(VENV)/bin/clang-format --dry-run -Werror $(CSRC)

format: $(VENV)/.ready  ## rewrites the sources as `make check` wants them
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format
	@$(VENV)/bin/clang-format -i $(CSRC)

sanitize:  ## the core's stress program under ASan/UBSan and under TSan; QUICK=1: two minutes, as continuous integration does
	@$(MAKE) --no-print-directory -C tests/native $(if $(QUICK),quick,sanitize)

soak: build  ## mixed work under a budget that changes, until MINUTES=10 are over or Ctrl-C; SEED=0; PART=serve: a server among idle, slow, hostile, random and fuzzing clients, a table of what was seen, and requests to two models at once
ifeq ($(PART),serve)
	@BALLONET_SOAK=$$((30 * $(or $(MINUTES),10))) $(if $(SEED),BALLONET_SEED=$(SEED)) $(PY) -m pytest -n 0 -s $(patsubst %,tests/serving/test_%.py,soak clients fuzz ordeal)
else
	@$(PY) benchmarks/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))
endif

kills: build  ## replicas are killed at random microbatches, for SEEDS=50 seeds, at every row of the fault matrix, and while groups form and part
	@BALLONET_KILLS=$(or $(SEEDS),50) $(PY) -m pytest -n 0 -s tests/replicas/test_kills.py tests/replicas/test_serve.py

bench: build  ## the benchmarks; RESULTS=folder, TRACES=recorded traces
	@$(PY) benchmarks/run.py cpu cpu-pressure cpu-serving --results $(RESULTS) $(if $(TRACES),--traces $(TRACES))

figures: build  ## puts what was measured, benchmarks/results, into docs/measuring.md, and draws the README's picture
	@$(PY) benchmarks/figures.py

gpu:  ## tests and benchmarks on an NVIDIA device, in place, with the machine's own Python; PART=core, kv, weights, remap, balloon, serve, pieces, speed, replicas or prefix, RESULTS=folder, MINUTES=9, ONLY="preflight tests decode"
	@$(PYTHON) -c 'import importlib.util as i, sys; missing = [n for n in ("setuptools", "pybind11") if i.find_spec(n) is None]; \
		sys.exit(f"make gpu needs {chr(32).join(missing)} in {sys.executable}: pip install {chr(32).join(missing)}" if missing else 0)'
	@$(PYTHON) setup.py -q build_ext --inplace
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/run.py $(PART) --results $(RESULTS) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY))

docs: $(VENV)/.ready  ## the documentation as a site, build/site/index.html
	@$(call extra,material,docs)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@echo "build/site/index.html"

wheel: $(VENV)/.ready  ## dist/: the sdist, and for each Python found a manylinux wheel that needs no compiler under the supported releases of torch (530 MB for each, fetched once); TORCH="2.13.0 2.15.0" or none, PYTHONS="python3.12"
	@$(call extra,auditwheel,release)
	@PYTHONPATH=src $(PY) .ci/wheels.py $(if $(TORCH),--torch "$(TORCH)") $(if $(PYTHONS),--python "$(PYTHONS)")

clean:  ## removes what was built; keeps the environment
	@rm -rf build dist ballonet.egg-info allocator/*.so

# $(call step,what,command): one line of progress; the command's output goes to the log and is shown if it fails.
step = @printf '  %-52s' '$(1)'; start=$$SECONDS; if $(2) >>$(LOG) 2>&1; then echo "$$((SECONDS - start)) s"; \
	else echo 'failed:'; tail -n 30 $(LOG); exit 1; fi
# Without bytecode: that of all of torch and transformers takes half a minute, and Python makes it of what is imported.
install = $(PY) -m pip install --progress-bar off --no-compile -c constraints.txt

# $(call extra,module,name): the packages of an extra of pyproject.toml, where its module is not there.
named = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])
extra = $(PY) -c 'import $(1)' 2>/dev/null || $(install) -q -c constraints-extras.txt $$($(PY) -c '$(call named,$(2))')

# torch comes first and alone: asked for together with packages that depend on it, a resolver may take the build of
# another index, which brings gigabytes of CUDA. The native core, which needs none of them, is made beside the others.
$(VENV)/.ready: constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ballonet needs Python 3.11 or newer: make PYTHON=...")'
	@mkdir -p build && : >$(LOG)
	@echo "Setting up $(VENV) (once, about a minute; log in $(LOG))"
	$(call step,virtual environment,{ test -x $(PY) || $(PYTHON) -m venv $(VENV); })
	$(call step,build tools,$(install) setuptools wheel pybind11)
	$(call step,torch,$(install) "$$(grep '^torch==' constraints.txt)")
	$(call step,dependencies and native core,{ $(PY) setup.py -q build_ext --inplace & \
		$(install) --no-deps -r constraints.txt && wait $$!; })
	$(call step,ballonet,$(install) --no-build-isolation -e '.[dev]')
	@touch $@

build/transformers-%/.ready:
	$(call step,transformers $*,$(PY) -m pip install -q --no-compile --no-deps --target $(@D) transformers==$*)
	@touch $@

$(VLLM)/.ready: tests/vllm/requirements.txt tests/vllm/environment.py | $(VENV)/.ready
	@mkdir -p build && : >$(LOG)
	$(call step,environment of vLLM,{ test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM); })
	$(call step,vLLM,$(VLLM)/bin/pip install --progress-bar off --no-compile --no-deps -r tests/vllm/requirements.txt)
	$(call step,packages of $(VENV) in it,$(VLLM)/bin/python tests/vllm/environment.py $(PY) $(CURDIR)/src)
	@touch $@
