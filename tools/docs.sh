#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: docs.sh [PYTHON]. Builds the documentation as a site: build/site. A link or an anchor that leads nowhere is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
environment=.venv-docs
[ -x $environment/bin/python ] || "$python" -m venv $environment
$environment/bin/python -m pip install -q --upgrade 'pip>=25.1'
$environment/bin/python -m pip install -q --group docs
NO_MKDOCS_2_WARNING=1 $environment/bin/python -m mkdocs build
