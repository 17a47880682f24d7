"""Stand-ins for Google's and Amazon's storage, in this process."""

import contextlib
import re
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

BUCKET = "drafts"


@contextlib.contextmanager
def storage_servers() -> Iterator[None]:
    """gs:// and s3:// mean servers on this machine, with a bucket each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    amazon = ThreadedMotoServer("127.0.0.1", port=0)
    amazon.start()
    url = "http://{}:{}".format(*amazon.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    with _google(port), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ENDPOINT_URL", url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "any")
        yield
    amazon.stop()


def _google(port: int):
    """The emulator, taught two things that TensorStore asks of Google: generations, and ranges from an object's end."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    download = objects.download

    def as_google(request, response, storage, *args, **kwargs):
        name = (request.params["bucket_name"], request.params["object_id"])
        from_end = re.fullmatch(r"bytes=-(\d+)", request.get_header("range") or "")
        with contextlib.suppress(NotFound):
            start = max(len(storage.get_file(*name)) - int(from_end[1]), 0) if from_end else 0
            response["x-goog-generation"] = str(storage.get_file_obj(*name)["generation"])
            if from_end:
                request._request_handler.headers.replace_header("range", f"bytes={start}-")
        download(request, response, storage, *args, **kwargs)

    objects.download = as_google
    from gcp_storage_emulator.server import create_server  # its table of handlers is made now

    return create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
