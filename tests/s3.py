"""An S3 server in a process of its own, and a connection to it that tests cut."""

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
import urllib.request

_SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
_BYTES = 4096


class Server:
    """moto's S3, with one bucket, `bucket`."""

    def __init__(self):
        self.port = _free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{_url(self.port)}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                return
            assert time.monotonic() < until and self._process.poll() is None
            time.sleep(0.05)

    def environment(self, port=None):
        """What leads a process here, or to a `Cable`; botocore's own attempts hide no loss."""
        return {**_SECRETS, "AWS_ENDPOINT_URL": _url(port or self.port), "AWS_MAX_ATTEMPTS": "1"}

    def files(self):
        """The file system, as another client sees it."""
        import s3fs

        return s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=_url(self.port), use_listings_cache=False,
            skip_instance_cache=True,
        )

    def close(self):
        """Ends it."""
        self._process.kill()
        self._process.wait()


class Cable:
    """A TCP connection to a server, which can be cut for a while or for good.

    num_cuts: so far. delay: seconds that each block takes.
    """

    def __init__(self, port):
        self._server, self._open, self._lock = port, set(), threading.Lock()
        self._drops = lambda block: False
        self._until, self.num_cuts, self.delay = 0.0, 0, 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def on_upload(self, name, act, after=0):
        """Calls `act` in the midst of the next upload of a file whose name ends so.

        Args:
            name: bytes.
            act: without arguments; the block that has come does not reach the server.
            after: so many bytes of the file and its header do.
        """
        passed = None  # its bytes so far

        def drops(block):
            nonlocal passed
            if block.startswith(b"PUT ") and name in block.split(b" HTTP")[0]:
                passed = 0
            if passed is None or passed + len(block) <= after:
                passed = None if passed is None else passed + len(block)
                return False
            act()
            return True

        self._drops = drops

    def on_block(self, count, act):
        """Calls `act` when so many blocks have come from the client, whatever they are."""
        counted = itertools.count(1)

        def drops(block):
            if next(counted) < count:
                return False
            act()
            return True

        self._drops = drops

    def cut(self, seconds):
        """Ends all connections, and lets none come up in this time."""
        self.num_cuts += 1
        self._until = time.monotonic() + seconds
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.cut(1e9)
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if time.monotonic() < self._until:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server))
                with self._lock:
                    self._open |= {client, server}
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source, target, is_request):
        with contextlib.suppress(OSError):
            while block := source.recv(_BYTES):
                time.sleep(self.delay)
                if is_request and self._drops(block):
                    self._drops = lambda block: False
                    break
                target.sendall(block)
        with self._lock:
            self._open -= {source, target}
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()


def _url(port):
    return f"http://127.0.0.1:{port}"


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
