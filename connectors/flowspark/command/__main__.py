"""``python -m flowspark.command``, where the script ``flow`` is not on the path."""

import sys

from flowspark.command.main import main

if __name__ == "__main__":
    sys.exit(main())
