#!/usr/bin/env bash
# Install PyTorch/XLA with its CPU device, in a separate environment (8 GB: PyPI's torch 2.9 includes CUDA):
#     scripts/setup_xla.sh [DIRECTORY]        default: .venv-xla; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

make_once xla "${1:-.venv-xla}" 12

# torch_xla 2.9 has wheels for Python 3.10 to 3.13 on Linux only.
echo "xla: installing torch, torch_xla and this package"
install --requirement locks/xla.in --editable '.[xla]'

PJRT_DEVICE=CPU "$directory/bin/python" -c 'import torch_xla; print("xla:", torch_xla.device(), "is available")'
touch "$ready"
