"""Google's storage, on this machine: an emulator that Orbax, TensorStore and gcsfs all talk to."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "the-bucket"
_download = objects.download


def _download_with_generation(request: Any, response: Any, storage: Any, **given: Any) -> None:
    """As Google does; the emulator leaves it out, and TensorStore can then not write it again."""
    _download(request, response, storage, **given)
    with contextlib.suppress(Exception):
        name = request.params["bucket_name"], request.params["object_id"]
        response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]


class _Handler(RequestHandler):
    """One request at a time; a client that connects and says nothing keeps no other waiting."""

    timeout = 20
    _one_by_one = threading.Lock()

    def do_GET(self) -> None:
        with self._one_by_one:
            super().do_GET()

    def do_POST(self) -> None:
        with self._one_by_one:
            super().do_POST()

    def do_DELETE(self) -> None:
        with self._one_by_one:
            super().do_DELETE()

    def do_PUT(self) -> None:
        with self._one_by_one:
            super().do_PUT()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has its answer may go before the end of another one."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A bucket's URL. What this process or a child of it does with gs:// goes there meanwhile."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    server = _Server(("127.0.0.1", 0), functools.partial(_Handler, storage))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="bucket", daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "download", _download_with_generation)
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "none")
        # Nobody looks for credentials, or asks Google what kind of bucket it is.
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon", "use_listings_cache": False})
        patch.setenv("FSSPEC_GCS", '{"token": "anon"}')
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("NO_GCE_CHECK", "true")
        try:
            yield f"gs://{BUCKET}"
        finally:
            server.shutdown()
            thread.join(10)
            server.server_close()
