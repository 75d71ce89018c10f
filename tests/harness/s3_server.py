"""moto's S3 server on loopback, with faults that a test chooses for each request."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from pyarrow import fs

__all__ = ["S3Server"]

_ERRORS = {"503": ("503 Slow Down", "SlowDown"), "403": ("403 Forbidden", "AccessDenied")}


class S3Server:
    """Serves without faults until :meth:`close`.

    ``fault`` is called with method, path and access key of each request. It returns None, or "503" or "403"
    to answer with these; "cut" to close the connection; "half" to close it within the body of the answer; or
    "slow" to close it only at :meth:`reset` or :meth:`close`.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests: list[tuple[str, str]] = []
        self._over = threading.Event()
        self.reset()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server")
        self._thread.start()

    def reset(self) -> None:
        """End slow requests, for which new clients of pyarrow wait, too, and serve without faults."""
        self._over.set()
        self._over = threading.Event()
        self.fault: Callable[[str, str, str], str | None] = lambda *request: None
        self.requests.clear()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def filesystem(self, key: str = "key", **options: Any) -> fs.S3FileSystem:
        """A client that leaves repetitions to polyhvd."""
        return fs.S3FileSystem(
            access_key=key,
            secret_key="secret",
            endpoint_override=self.address,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
            **options,
        )

    def uri(self, path: str) -> str:
        return f"s3://key:secret@{path}?endpoint_override={self.address}&scheme=http&region=us-east-1"

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"])
        self.requests.append(request)
        key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        over = self._over
        fault = self.fault(*request, key)
        if fault in _ERRORS:
            status, code = _ERRORS[fault]
            start_response(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]
        if fault == "slow":
            over.wait()
        if fault in ("slow", "cut"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("200 OK", [])
            return []
        answer = self._application(environ, start_response)
        return self._half(b"".join(answer), environ) if fault == "half" else answer

    @staticmethod
    def _half(body: bytes, environ: dict[str, Any]) -> Iterable[bytes]:
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
