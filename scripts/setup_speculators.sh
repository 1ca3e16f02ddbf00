#!/usr/bin/env bash
# Install speculators, which trains drafts of the same layout, in a separate environment (2 GB):
#     scripts/setup_speculators.sh [DIRECTORY]     default: .venv-speculators; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

make_once speculators "${1:-.venv-speculators}" 4
install_cpu_torch
install_rest # without torchvision and torchaudio, which nothing here imports
"$directory/bin/python" -c 'import speculators.train.cli; print("speculators: its trainer imports")'
touch "$ready"
