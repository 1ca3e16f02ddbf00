#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml allows, in a separate environment (8 GB if the index has no
# CPU build of that torch):
#     scripts/setup_floor.sh [DIRECTORY]        default: .venv-floor; a second call with the same bounds does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

python=${PYTHON:-python3}
pins=$("$python" scripts/lower_bounds.py)
torch=$("$python" scripts/lower_bounds.py torch)
make_once floor "${1:-.venv-floor}" "bounds $(cksum <<<"$pins" | cut -d' ' -f1)" 12

echo "floor: installing ${pins//$'\n'/ }"
pip install --upgrade 'pip>=25.1'
pip install "$torch+cpu" 2>/dev/null ||
  pip install --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2>/dev/null ||
  pip install "$torch"
echo "$pins" >"$directory/pins.txt"
pip install --group dev --editable . --constraint "$directory/pins.txt"
touch "$ready"
