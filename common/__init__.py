"""What more than one process needs: rooms with one owner each, and five flat modules.

Owns the wire, the network, the policy, the coordinator, the client and the launcher. Does not know
the two services, which are started by name and met on the wire. Imports neither of them.
"""
