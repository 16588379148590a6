from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

# The suites are no test modules by their names, but their asserts are to explain themselves too.
for suite in ("base", "moves_suite", "suite"):
    pytest.register_assert_rewrite(f"flowstate.testing.storage_{suite}")


@dataclass(frozen=True)
class S3Location:
    """A folder in a bucket of its own, and the options that open it."""

    url: str
    options: dict[str, Any] = field(repr=False)


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Start a server with S3's interface in this process; return how to reach it."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        # S3 decides and writes a conditional PUT in one step. moto looks first and writes then, so
        # that two of them could both succeed.
        if "HTTP_IF_NONE_MATCH" not in environ:
            return application(environ, start_response)
        with one_at_a_time:
            return application(environ, start_response)

    with pytest.MonkeyPatch.context() as environment:
        # Neither a developer's own settings nor a proxy may come between us and the server.
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            environment.delenv(name, raising=False)
        environment.setenv("AWS_CONFIG_FILE", "/dev/null")
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        environment.setenv("NO_PROXY", "127.0.0.1")
        server = make_server(
            "127.0.0.1", 0, serve, threaded=True, request_handler=MotoRequestHandler
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {
            "key": "access-key-of-the-tests",
            "secret": "secret-key-of-the-tests",
            "endpoint_url": f"http://127.0.0.1:{server.server_port}",
            # Not us-east-1, the one region that may not be named when a bucket is made in it.
            "client_kwargs": {"region_name": "eu-central-1"},
        }
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def s3_location(s3_options: dict[str, Any]) -> S3Location:
    """Make a bucket."""
    import s3fs

    # All servers of a process share their buckets.
    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(**s3_options).mkdir(bucket)
    return S3Location(f"s3://{bucket}/state", s3_options)
