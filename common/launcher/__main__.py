"""`python -m common.launcher` is `dflash-up`."""

from common.launcher.cli import main

main()
