#!/usr/bin/env bash
# Install transformers 4, which NxD Inference uses to read configurations, in a separate environment without
# torch (0.3 GB):
#     scripts/setup_transformers4.sh [DIRECTORY]   default: .venv-transformers4; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

make_once transformers4 "${1:-.venv-transformers4}" 1
install --requirement locks/transformers4.in
touch "$ready"
