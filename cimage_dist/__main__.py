"""`python -m cimage_dist`: the command line without the installed script."""

import sys

from cimage_dist.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
