"""`python -m helixrt.train [+experiment=NAME] [key=value ...]`: train, here or as a Ray job's entrypoint."""

import sys

from helixrt.train.schema import command

if __name__ == "__main__":
    from helixrt.train.driver import train

    sys.exit(command(sys.argv[1:], train))
