#!/usr/bin/env bash
# Install the newest versions that pyproject.toml allows, without a lock, in a separate environment (8 GB, as
# PyPI's torch includes CUDA), anew at each call:
#     scripts/setup_newest.sh [DIRECTORY]                  default: .venv-newest
#     BOUNDS=none scripts/setup_newest.sh [DIRECTORY]      without the upper bounds too
set -euo pipefail
directory=${1:-}
[[ -z $directory || $directory == /* ]] || directory=$PWD/$directory # before the folder changes
cd "$(dirname "${BASH_SOURCE[0]}")/.."

directory=${directory:-.venv-newest}
pip() { "$directory/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

"${PYTHON:-python3}" -m venv --clear "$directory"
pip install --upgrade pip
if [[ ${BOUNDS:-} == none ]]; then
  "$directory/bin/python" scripts/newest.py requirements >"$directory/requirements.txt"
  pip install --requirement "$directory/requirements.txt"
  pip install --no-deps --editable .
else
  pip install --group dev --editable .
fi
