# One command per intent, the same at the desk and in CI. Everything stays in this folder: .venv/ and .cache/.
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3.11
PY := .venv/bin/python
# No script may import what merely lies in the current folder: only the installed package kvstore counts.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv
venv: .venv/ready

# torch comes first and alone, so that no other requirement can choose another build of it
.venv/ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --progress-bar off torch==2.13.0
	$(PY) -m pip install --progress-bar off -e '.[daemon,worker,dev]'
	touch $@
