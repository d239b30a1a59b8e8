"""``python -m hot``: the same as the command ``hot``."""

from hot.cli import main

main()
