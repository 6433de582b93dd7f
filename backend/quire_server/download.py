# SPDX-License-Identifier: Apache-2.0
"""Command line of download Jobs: `python -m quire_server.download`.

The Jobs that the operator renders start this module by this name.
"""

import sys

from quire_server.downloads.model_download import main

if __name__ == "__main__":
    sys.exit(main())
