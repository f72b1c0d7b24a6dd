"""A socket in front of another one, whose connections a test can cut.

It passes bytes on; `cut` breaks every connection, `shut` refuses new ones until `open`.
"""

import contextlib
import socket
import threading


class Cutter:
    """Between a client and a coordinator: both on a socket file, or both on a port of this host.

    Args:
        path: where it listens; None: on a free port.
        upstream: the coordinator's socket file, or its port.
    """

    def __init__(self, path, upstream):
        self.path, self.upstream = path, upstream
        self.address = f"ipc://{path}"
        self.n_cut = 0
        self._pairs, self._threads = [], []
        self._lock = threading.Lock()
        self._listener = None

    def __enter__(self):
        self.open()
        return self

    def __exit__(self, *_):
        self.shut()
        for thread in self._threads:
            thread.join(5)

    def open(self):
        """Let connections through."""
        if self.path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self.path.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self.path))
            self._listener.listen()
        self._start(self._accept, self._listener)

    def shut(self):
        """Break every connection and let none through; the socket file stays."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def cut(self):
        """Break every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        self.n_cut += len(pairs)
        for one in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, call, *arguments):
        thread = threading.Thread(target=call, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = self._dial()
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            self._start(self._pass_on, near, far)
            self._start(self._pass_on, far, near)

    def _dial(self):
        if self.path is None:
            return socket.create_connection(("127.0.0.1", self.upstream))
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(str(self.upstream))
        except OSError:
            far.close()
            raise
        return far

    def _pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
