#!/usr/bin/env bash
# Prepare a fresh Trn2 or Trn3 instance for `python -m train`: native PyTorch (TorchNeuron, SDK 2.33 or later).
#     scripts/setup_trn2.sh [DIRECTORY]         default: .venv-neuron; a second call does nothing
#     TORCH=2.13 scripts/setup_trn2.sh          default: 2.14
#     NO_DEVICE=1 scripts/setup_trn2.sh         in a container image, without device checks
# AWS's wheels are self-contained on Ubuntu 26.04 only. The DLAMI "Neuron torch-neuronx" (Ubuntu 24.04 and 26.04,
# 512 GB of disk) has an environment under /opt; if it exists, it is used and DIRECTORY is not created.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/neuron_setup.sh
source scripts/neuron_setup.sh

torch=${TORCH:-2.14} # torch-neuronx has the version of its PyTorch
[[ $torch == 2.13 || $torch == 2.14 ]] || refuse "TORCH: must be 2.13 or 2.14, got $torch; leave it out"
if [[ -z ${NO_DEVICE:-} ]]; then
  need_instance "for Trn1 and Inf2 use scripts/setup_trn1.sh, for other machines make demo" \
    trn2 trn2u trn3 trn3u
  need_device
fi

shipped=$(compgen -G "$host/opt/aws_neuronx_venv_torch_neuronx_${torch/./_}_*" | tail -1) || true
directory=${shipped:-${1:-.venv-neuron}}
python=$directory/bin/python
ready=$directory/.ready-draftsmith-torch-$torch-$(packages_checksum)

create() {
  local base
  [[ $(ubuntu_release) == 26.04 ]] ||
    refuse "Ubuntu: must be 26.04, got $(ubuntu_release) without /opt/aws_neuronx_venv_torch_neuronx_*;" \
      "start from the DLAMI 'Neuron torch-neuronx $torch'"
  # Hydra 1.3 was written before Python 3.14, on which conf/entry.py starts it by a detour.
  base=${PYTHON:-$(command -v python3.13 || command -v python3.12 || command -v python3.14 || echo python3)}
  need_python "$base" 12 14
  need_index "$base"
  echo "setup: creating $directory with $("$base" --version)"
  "$base" -m venv "$directory"
  install "$python" --upgrade 'pip>=25.1'
  echo "setup: installing torch-neuronx $torch"
  install "$python" "torch-neuronx==$torch.*" 'neuronx-cc==2.*' nki
}

if [[ ! -e $ready ]]; then
  [[ -n $shipped ]] || create
  need_python "$python" 12 14
  for name in torch-neuronx torch; do
    need_package "$python" "$name" "$torch.*" "this is another generation or PyPI's placeholder; remove $directory"
    echo "$name==$(version_of "$python" "$name")"
  done >"$directory/pinned.txt"
  echo "setup: installing this package and the versions of $lock into $directory, torch stays as it is"
  install "$python" --constraint "$directory/pinned.txt" --constraint "$lock" --editable .
  touch "$ready"
fi

print_next_steps "$directory" neuron
