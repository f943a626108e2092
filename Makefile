# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
.PHONY: quickstart test test-all docs wheel wheels wheel-cuda release-check clean

quickstart:
	bash tools/quickstart.sh $(PYTHON)

test:
	bash tools/test.sh $(PYTHON)

test-all:
	STOF_TEST_ALL=1 bash tools/test.sh $(PYTHON)

docs:
	bash tools/docs.sh $(PYTHON)

wheel:
	bash tools/wheel.sh $(PYTHON)

wheels:
	bash tools/wheels.sh $(PYTHON)

wheel-cuda:
	bash tools/wheel_cuda.sh $(PYTHON)

release-check:
	bash tools/release_check.sh $(PYTHON)

clean:
	rm -rf build dist .venv .venv-docs .venv-test .venv-plain .venv-wheel .venv-wheels .venv-wheel-tools .venv-export .venv-genai .venv-integrations .venv-windows .venv-trt-*
