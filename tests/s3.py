"""An S3 server in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request


class Server:
    """moto's S3, with one bucket, `bucket`; environment: what leads a process here."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
        self._url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": self._url,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{self._url}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                return
            assert time.monotonic() < until and self._process.poll() is None
            time.sleep(0.05)

    def files(self):
        """The file system, as another client sees it."""
        import s3fs

        return s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=self._url, use_listings_cache=False,
            skip_instance_cache=True,
        )

    def close(self):
        """Ends it."""
        self._process.kill()
        self._process.wait()


def kill_before(end, count=1):
    """This process is killed before its count-th upload of a file whose name ends so."""
    from fsspec.implementations.dirfs import DirFileSystem

    put_file, left = DirFileSystem.put_file, count

    def put_or_die(self, local, name):
        nonlocal left
        left -= name.endswith(end)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        put_file(self, local, name)

    DirFileSystem.put_file = put_or_die
