"""Write the golden frames again: only together with a new protocol version.

Each file is one msgpack array with the frames of one message. Run from the repository's root:
`PYTHONPATH=.:tests python tests/golden/make_frames.py`.
"""

import msgpack
from support.messages import GOLDEN, NAMED

from common.wire.codec import pack

for name, message in NAMED.items():
    frames = [bytes(frame) for frame in pack(message)]
    (GOLDEN / f"{name}.bin").write_bytes(msgpack.packb(frames))
