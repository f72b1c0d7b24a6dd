"""How bytes move.

Owns sockets, keys, liveness clocks, the worker's shell and the in-process mesh for tests.
Does not know what a message makes anybody do, requests, models or configuration files.
May import: pyzmq, psutil, `common.wire`, `common.errors`.
"""
