#!/usr/bin/env bash
# Prepare a fresh Trn1 or Inf2 instance for `python -m train`: PyTorch/XLA from the last Neuron SDK that has it.
#     scripts/setup_trn1.sh [DIRECTORY]         default: .venv-neuron-xla; a second call does nothing
#     NO_DEVICE=1 scripts/setup_trn1.sh         in a container image, without device checks
# Start from a DLAMI of SDK 2.31 (later ones have no torch 2.9), Ubuntu 24.04, 512 GB of disk. It is the last SDK
# whose packages for this route fit together, so all versions are pinned.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/neuron_setup.sh
source scripts/neuron_setup.sh

directory=${1:-.venv-neuron-xla}
python=${PYTHON:-$(command -v python3.12 || command -v python3.11 || command -v python3.13 || echo python3)}
pinned=(
  torch==2.9.0
  torch-xla==2.9.0
  torch-neuronx==2.9.0.2.15.32035
  neuronx-cc==2.26.6360.0
  libneuronxla==2.2.17544.0
  neuronx-distributed==0.19.28492
)
ready=$directory/.ready-sdk-2.31-$(packages_checksum)

if [[ -z ${NO_DEVICE:-} ]]; then
  need_instance "for Trn2 and Trn3 use scripts/setup_trn2.sh, for other machines make demo" trn1 trn1n inf2
  need_device
fi
need_python "$python" 11 13

if [[ ! -e $ready ]]; then
  need_index "$python"
  echo "setup: creating $directory with $("$python" --version)"
  "$python" -m venv "$directory"
  install "$directory/bin/python" --upgrade 'pip>=25.1'
  echo "setup: installing this package with PyTorch/XLA for Neuron: ${pinned[*]}"
  install "$directory/bin/python" --constraint "$lock" "${pinned[@]}" --editable .
  for name in torch-neuronx torch torch-xla; do
    need_package "$directory/bin/python" "$name" '2.9.*' "remove $directory and run again"
  done
  touch "$ready"
fi

print_next_steps "$directory" xla optim=adamw # this route rejects Muon
