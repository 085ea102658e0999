"""Google's storage, on this machine: an emulator that Orbax, TensorStore and gcsfs all talk to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
from gcp_storage_emulator.server import create_server

BUCKET = "the-bucket"


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A bucket's URL. What this process or a child of it does with gs:// goes there meanwhile."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    # A client that has its answer may go before the end of another one.
    server._api._httpd.handle_error = lambda *_: None
    host, port = server._api._httpd.socket.getsockname()[:2]
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "none")
        # Nobody asks Google what kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("NO_GCE_CHECK", "true")
        try:
            yield f"gs://{BUCKET}"
        finally:
            server.stop()
