"""What bytes mean.

Owns the messages, their byte form, tensors on the wire, versions, and which role may send what.
Does not know sockets, threads, clocks or what anybody does with a message.
May import: msgpack, numpy, `common.errors`. `PROTOCOL.md` is the authority for other languages.
"""
