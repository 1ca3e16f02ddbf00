#!/usr/bin/env bash
# Install PyTorch/XLA with its CPU device, in a separate environment (8 GB: PyPI's torch 2.9 includes CUDA):
#     scripts/setup_xla.sh [DIRECTORY]        default: .venv-xla; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

version=2.9.0 # of torch and torch_xla, which must match
make_once xla "${1:-.venv-xla}" "torch $version" 12

# torch_xla 2.9 has wheels for Python 3.10 to 3.13 on Linux only.
echo "xla: installing torch $version, torch_xla $version and this package"
pip install "torch==$version" "torch_xla==$version" --editable '.[xla]'

PJRT_DEVICE=CPU "$directory/bin/python" -c 'import torch_xla; print("xla:", torch_xla.device(), "is available")'
touch "$ready"
