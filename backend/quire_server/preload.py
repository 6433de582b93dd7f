# SPDX-License-Identifier: Apache-2.0
"""Command line of the image build, `python -m quire_server.preload`. The Dockerfile contains this module name."""

import sys

from quire_server.model_server.preload.preload import main

if __name__ == "__main__":
    sys.exit(main())
