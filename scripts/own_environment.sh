# shellcheck shell=bash
# Functions shared by setup_engines.sh, setup_floor.sh, setup_speculators.sh, setup_transformers4.sh and
# setup_xla.sh: packages that conflict with ours get a separate environment, which is created once per lock.

# make_once NAME DIRECTORY GB: exits if the environment is ready, or if the disk has no room for it and its
# wheels. The file $ready marks a complete environment of this $lock.
make_once() {
  local name=$1 gb=$3 python=${PYTHON:-python3} free
  directory=$2
  lock=locks/$name.txt
  ready=$directory/.ready-$(cksum "$lock" | cut -d' ' -f1)
  if [[ -e $ready ]]; then
    echo "$name: $directory is ready ($lock)"
    exit
  fi
  free=$(df -Pk "$(dirname "$directory")" | awk 'END { print int($4 / 1e6) }')
  if ((free < gb)); then
    echo "error: $directory: needs $gb GB of disk during the installation, got $free; free some" >&2
    exit 1
  fi
  echo "$name: creating $directory with $("$python" --version)"
  "$python" -m venv "$directory"
}

# install ARGUMENT...: arguments of pip install; the lock fixes every version.
install() {
  "$directory/bin/python" -m pip -qq --disable-pip-version-check install --constraint "$lock" "$@"
}

# install_cpu_torch: the +cpu build of the lock's torch, from the configured indexes or from PyTorch's own.
install_cpu_torch() {
  local torch
  torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1+cpu/p' "$lock")
  echo "$directory: installing $torch"
  install "$torch" 2>/dev/null ||
    install --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
}

# install_rest: everything else in the lock but the CUDA libraries, which PyPI's torch alone needs. pip resolves
# nothing, because these packages ask for torchvision and torchaudio, of which PyPI has no CPU builds.
install_rest() {
  echo "$directory: installing the other packages of $lock"
  install --no-deps --requirement <(grep -vE '^(torch==|nvidia-|cuda-)' "$lock")
}
