#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml allows, in a separate environment (8 GB if the index has no
# CPU build of that torch):
#     scripts/setup_floor.sh [DIRECTORY]        default: .venv-floor; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

make_once floor "${1:-.venv-floor}" 12
install --upgrade 'pip>=25.1' # for --group
install_cpu_torch || install torch
echo "floor: installing this package and its development tools"
install --group dev --editable .
touch "$ready"
