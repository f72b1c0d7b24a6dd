"""`dflash-up`: starts, watches, scales and stops the processes of one run.

Owns the command line, the run folder, the processes and what an operator sees.
Does not know models, rounds or tensors; starts services by module name, never by import.
May import: click, psutil, rich, `common.sdk`, `common.net`, `common.wire` and all to their left.
"""
