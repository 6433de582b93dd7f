# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m quire_server.preload`, which runs while an image is built. The Dockerfile contains the name
of this module."""

import sys

from quire_server.model_server.preload.preload import main

if __name__ == "__main__":
    sys.exit(main())
