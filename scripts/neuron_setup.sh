# shellcheck shell=bash
# What setup_trn1.sh and setup_trn2.sh share: what they ask of a machine before they install anything,
# how they install, what they ask of the packages. Every refusal is one line, exit code 2. HOST_ROOT
# is put before the paths of the machine, for the tests.

neuron_index=https://pip.repos.neuron.amazonaws.com
cpu_index=https://download.pytorch.org/whl/cpu
host=${HOST_ROOT:-}

refuse() {
  echo "error: $*" >&2
  exit 2
}

# EC2 writes the type of an instance (trn2.48xlarge) where other machines carry their product name.
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
    refuse "device: must exist, got no /dev/neuron0; reboot, and see what neuron-ls says"
  [[ -e $host/opt/aws/neuron/lib/libnrt.so.1 ]] ||
    refuse "runtime: must be installed, got no /opt/aws/neuron/lib/libnrt.so.1;" \
      "sudo apt-get install aws-neuronx-runtime-lib aws-neuronx-collectives"
}

# need_python PYTHON LOWEST HIGHEST: of Python 3
need_python() {
  local found
  found=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || found="nothing"
  if [[ $found != 3.* ]] || ((${found#3.} < $2 || ${found#3.} > $3)); then
    refuse "PYTHON: must be Python 3.$2 to 3.$3, got $found ($1); set PYTHON=/path/to/python3.$3"
  fi
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "PYTHON: must have the module venv, got $1 without; sudo apt-get install python$found-venv"
}

# need_index PYTHON: PyPI holds placeholders under Neuron's names, so that without AWS's own index
# an installation would end with the wrong packages, not with an error.
need_index() {
  "$1" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/", timeout=20)' \
    "$neuron_index" 2>/dev/null ||
    refuse "index: must be reachable, got no answer of $neuron_index; open port 443 to it"
}

# install PYTHON ARGUMENT... of pip install
install() {
  "$1" -m pip -qq --disable-pip-version-check install \
    --extra-index-url "$neuron_index" --extra-index-url "$cpu_index" "${@:2}" ||
    refuse "pip: must install ${*:2}, got what is said above; mind the index, the disk and the network"
}

version_of() {
  "$1" -c 'import sys; from importlib.metadata import version as v; print(v(sys.argv[1]))' "$2" 2>/dev/null
}

# need_package PYTHON NAME PATTERN REMEDY
need_package() {
  local found
  found=$(version_of "$1" "$2") || found="nothing"
  # shellcheck disable=SC2053  # a pattern is meant
  [[ $found == $3 ]] || refuse "$2: must be $3, got $found; $4"
}

# say_next DIRECTORY ROUTE [OVERRIDE...]: what to type now
say_next() {
  local machine
  machine=$(instance_type)
  [[ -e conf/machine/$machine.yaml ]] || machine=here
  echo "setup: $1 is ready. Next, with what docs/trainium.md says:"
  cat <<NEXT
    source $1/bin/activate
    python -m train.plan machine=$machine device=$2
    python -m train device=${*:2}
NEXT
}
