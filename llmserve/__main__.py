"""`python -m llmserve`."""

import sys

from llmserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
