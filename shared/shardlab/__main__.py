"""`python -m shardlab`: list, build, run and doctor."""

import sys

from shardlab.course.cli import main

if __name__ == "__main__":
    sys.exit(main())
