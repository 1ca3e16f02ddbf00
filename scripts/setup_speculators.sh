#!/usr/bin/env bash
# Install speculators, which trains drafts of the same layout, in a separate environment (2 GB):
#     scripts/setup_speculators.sh [DIRECTORY]     default: .venv-speculators; a second call does nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/own_environment.sh
source scripts/own_environment.sh

torch=2.13.0
speculators=0.9.0
make_once speculators "${1:-.venv-speculators}" "torch $torch speculators $speculators" 4

install_cpu_torch "$torch"

# Without its dependencies, because torchvision and torchaudio have no CPU builds on PyPI; nothing here imports them.
echo "speculators: installing speculators $speculators"
pip install --no-deps "speculators==$speculators" "hs-connectors==$speculators"
pip install aiohttp click "datasets>=4,<=5.1" httpx "loguru>=0.7.2" "numpy>=2,<=2.5.4" openai protobuf psutil \
  pydantic pydantic-settings rich safetensors "tqdm>=4.66.3" "transformers>=5,<=5.19" typer
"$directory/bin/python" -c 'import speculators.train.cli; print("speculators: its trainer imports")'
touch "$ready"
