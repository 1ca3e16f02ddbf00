# shellcheck shell=bash
# Functions shared by setup_trn1.sh and setup_trn2.sh: checks of the machine before anything is installed,
# the installation, and checks of the installed packages. Every refusal is one line with exit code 2. HOST_ROOT
# is a prefix of the machine's paths, for the tests.

neuron_index=https://pip.repos.neuron.amazonaws.com
cpu_index=https://download.pytorch.org/whl/cpu
# Without torch, torch-neuronx, libneuronxla and what they need, which AWS fixes.
# shellcheck disable=SC2034  # the scripts that source this file read it
lock=locks/neuron.txt
host=${HOST_ROOT:-}

refuse() {
  echo "error: $*" >&2
  exit 2
}

# On EC2 the product name is the instance type (trn2.48xlarge).
instance_type() {
  cat "$host/sys/devices/virtual/dmi/id/product_name" 2>/dev/null || echo "unknown"
}

ubuntu_release() {
  sed -n 's/^VERSION_ID="\?\([0-9.]*\)"\?$/\1/p' "$host/etc/os-release" 2>/dev/null
}

# need_instance REMEDY FAMILY...
need_instance() {
  local remedy=$1 type family
  type=$(instance_type)
  shift
  for family; do
    [[ $type == "$family".* ]] && return
  done
  refuse "instance: must be of $(printf '%s ' "$@" | sed 's/ $//; s/ /, /g'), got $type; $remedy"
}

need_device() {
  [[ -d $host/sys/module/neuron ]] ||
    refuse "driver: must be loaded, got no kernel module 'neuron';" \
      "start from a Neuron DLAMI, or: sudo apt-get install aws-neuronx-dkms && sudo modprobe neuron"
  [[ -e $host/dev/neuron0 ]] ||
    refuse "device: must exist, got no /dev/neuron0; reboot, then check the output of neuron-ls"
  [[ -e $host/opt/aws/neuron/lib/libnrt.so.1 ]] ||
    refuse "runtime: must be installed, got no /opt/aws/neuron/lib/libnrt.so.1;" \
      "sudo apt-get install aws-neuronx-runtime-lib aws-neuronx-collectives"
}

# need_python PYTHON LOWEST HIGHEST: minor versions of Python 3
need_python() {
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version="nothing"
  if [[ $version != 3.* ]] || ((${version#3.} < $2 || ${version#3.} > $3)); then
    refuse "PYTHON: must be Python 3.$2 to 3.$3, got $version ($1); set PYTHON=/path/to/python3.$3"
  fi
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "PYTHON: must have the module venv, got $1 without it; sudo apt-get install python$version-venv"
}

# need_index PYTHON: PyPI has placeholders under Neuron's names, so without AWS's index an installation would
# end with the wrong packages instead of an error.
need_index() {
  "$1" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/", timeout=20)' \
    "$neuron_index" 2>/dev/null ||
    refuse "index: must be reachable, got no answer from $neuron_index; open port 443 to it"
}

# install PYTHON ARGUMENT...: arguments of pip install
install() {
  "$1" -m pip -qq --disable-pip-version-check install \
    --extra-index-url "$neuron_index" --extra-index-url "$cpu_index" "${@:2}" ||
    refuse "pip: must install ${*:2}, got the error above; check the index, the disk and the network"
}

version_of() {
  "$1" -c 'import sys; from importlib.metadata import version as v; print(v(sys.argv[1]))' "$2" 2>/dev/null
}

# need_package PYTHON NAME PATTERN REMEDY
need_package() {
  local version
  version=$(version_of "$1" "$2") || version="nothing"
  # shellcheck disable=SC2053  # $3 is a pattern
  [[ $version == $3 ]] || refuse "$2: must be $3, got $version; $4"
}

# packages_checksum: changes with what is to be installed
packages_checksum() {
  cat pyproject.toml "$lock" | cksum | cut -d' ' -f1
}

# print_next_steps DIRECTORY ROUTE [OVERRIDE...]
print_next_steps() {
  local machine
  machine=$(instance_type)
  [[ -e conf/machine/$machine.yaml ]] || machine=here
  echo "setup: $1 is ready. Next, as described in docs/trainium.md:"
  cat <<NEXT
    source $1/bin/activate
    python -m train.plan machine=$machine device=${*:2}
    python -m train device=${*:2}
NEXT
}
