# shellcheck shell=bash
# Functions shared by setup_engines.sh, setup_floor.sh, setup_speculators.sh, setup_transformers4.sh and
# setup_xla.sh: packages that conflict with ours get a separate environment, which is created once.

# make_once NAME DIRECTORY PACKAGES GB: exits if the environment is ready, or if the disk has no room for it
# and its wheels. The file $ready marks a complete environment.
make_once() {
  local name=$1 packages=$3 gb=$4 python=${PYTHON:-python3} free
  directory=$2
  ready=$directory/.ready-${packages// /-}
  if [[ -e $ready ]]; then
    echo "$name: $directory is ready ($packages)"
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

pip() { "$directory/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

# install_cpu_torch VERSION: the +cpu build, from the configured indexes or from PyTorch's own.
install_cpu_torch() {
  echo "$directory: installing torch $1, CPU build"
  pip install "torch==$1+cpu" 2>/dev/null ||
    pip install --timeout 20 --retries 1 \
      --extra-index-url https://download.pytorch.org/whl/cpu "torch==$1+cpu"
}
