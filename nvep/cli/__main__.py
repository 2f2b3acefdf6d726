"""``python -m nvep.cli`` is ``nvep``."""

import sys

from nvep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
