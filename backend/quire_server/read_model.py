# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m quire_server.read_model`, which the model reader's Jobs run. The operator writes the name
of this module into the Jobs."""

import sys

from quire_server.downloads.inspect_model import main

if __name__ == "__main__":
    sys.exit(main())
