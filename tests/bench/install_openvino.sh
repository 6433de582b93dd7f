#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install a peer of the benchmarks, OpenVINO GenAI, into an environment of its own: tests/bench/install_openvino.sh ~/openvino
# 2 GB, about four minutes. optimum-intel and nncf convert and quantize checkpoints.
set -euo pipefail
folder=${1:?usage: install_openvino.sh FOLDER}
"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.13.0
"$folder/bin/pip" install --quiet torch==2.13.0 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
# A requirement of optimum-intel that text does not need, and that does not import beside torch's CPU build.
"$folder/bin/pip" uninstall --quiet --yes torchvision
echo "use it with --openvino-python $folder/bin/python"
