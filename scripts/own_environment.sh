# shellcheck shell=bash
# What setup_engines.sh, setup_transformers4.sh and setup_xla.sh share: packages that do not go with
# ours get an environment of their own, made once.

# make_once NAME DIRECTORY PACKAGES GB: ends the script where the environment is ready, or where the disk
# has no room for it and for the wheels that it is made of. $ready marks what is ready.
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
    echo "error: $directory: needs $gb GB of disk while it is made, got $free; free some" >&2
    exit 1
  fi
  echo "$name: creating $directory with $("$python" --version)"
  "$python" -m venv "$directory"
}

pip() { "$directory/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
