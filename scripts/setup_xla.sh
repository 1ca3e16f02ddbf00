#!/usr/bin/env bash
# PyTorch/XLA with its CPU device, in an environment of its own (7 GB: PyPI's torch 2.9 carries CUDA):
#     scripts/setup_xla.sh [DIRECTORY]        default: .venv-xla; done once, a second call does nothing
set -euo pipefail

directory=${1:-.venv-xla}
python=${PYTHON:-python3}
version=2.9.0 # of torch and torch_xla alike: they must match
ready=$directory/.ready-torch-$version

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -e $ready ]]; then
  echo "xla: $directory is ready (torch and torch_xla $version)"
  exit
fi

pip() { "$directory/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

echo "xla: creating $directory with $("$python" --version)"
"$python" -m venv "$directory"

# torch_xla 2.9 has wheels for Python 3.10 to 3.13, on Linux alone.
echo "xla: installing torch $version, torch_xla $version and this package"
pip install "torch==$version" "torch_xla==$version" --editable '.[xla]'

PJRT_DEVICE=CPU "$directory/bin/python" -c 'import torch_xla; print("xla:", torch_xla.device(), "is there")'
touch "$ready"
