"""TCP connections through a port that can be broken."""

import socket
import threading


class Relay:
    """Passes TCP connections on to a port, until it drops them."""

    def __init__(self, target):
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._pairs = []
        self.num_dropped = 0

    def __enter__(self):
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        self.drop()

    def drop(self):
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self.num_dropped += 1
            for end in pair:
                end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self):
        while True:
            try:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._pairs.append((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source, sink):
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
