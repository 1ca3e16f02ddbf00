#!/usr/bin/env bash
# What an image needs below PyTorch, on Ubuntu: Python, a C++ compiler, Neuron's runtime and collectives from
# AWS's package index, EFA's libraries (its kernel module is the node's).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install --yes --no-install-recommends \
  ca-certificates curl g++ git gnupg pciutils python3 python3-dev python3-venv

key=/usr/share/keyrings/neuron.gpg
repository=https://apt.repos.neuron.amazonaws.com
release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
curl --fail --silent --show-error "$repository/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" | gpg --dearmor >"$key"
echo "deb [signed-by=$key] $repository $release main" >/etc/apt/sources.list.d/neuron.list
apt-get update
apt-get install --yes aws-neuronx-runtime-lib aws-neuronx-collectives aws-neuronx-tools

cd "$(mktemp -d)"
curl --fail --silent --show-error --remote-name \
  https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz
tar -xf aws-efa-installer-latest.tar.gz
(cd aws-efa-installer && ./efa_installer.sh --yes --skip-kmod --no-verify)

rm -rf "$PWD" /var/lib/apt/lists/*
