# SPDX-License-Identifier: Apache-2.0
"""Command line of model reader Jobs, `python -m quire_server.read_model`. The Jobs that the operator renders contain
this module name."""

import sys

from quire_server.downloads.inspect_model import main

if __name__ == "__main__":
    sys.exit(main())
