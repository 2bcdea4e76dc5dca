"""`python -m fairlead.launcher train.py --nproc_per_node=4 -- ARGS`: `fairlead launch`, as other launchers spell it."""

import sys

from fairlead.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", "--anywhere", *sys.argv[1:]]))
