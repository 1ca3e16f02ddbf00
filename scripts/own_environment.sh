# shellcheck shell=bash
# What setup_engines.sh and setup_xla.sh share: packages that do not go with ours get an environment
# of their own, made once.

# make_once NAME DIRECTORY PACKAGES: ends the script where the environment is ready. $ready marks it.
make_once() {
  local name=$1 packages=$3 python=${PYTHON:-python3}
  directory=$2
  ready=$directory/.ready-${packages// /-}
  if [[ -e $ready ]]; then
    echo "$name: $directory is ready ($packages)"
    exit
  fi
  echo "$name: creating $directory with $("$python" --version)"
  "$python" -m venv "$directory"
}

pip() { "$directory/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
