"""A local S3 server (moto's, in an environment of its own: `make s3_server`) for the tests of object storage."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import fs

from .ranks import REPOSITORY
from .train_command import free_port

SERVER = Path(os.environ.get("BRIGADE_S3_SERVER", REPOSITORY / ".venv/s3_server/bin/moto_server"))
BUCKET = "runs"


@contextmanager
def s3_server(folder: Path) -> Iterator[fs.S3FileSystem]:
    """Start a server with one empty bucket; the environment names it, with credentials. Yield a file system that sees it."""
    if not SERVER.exists():
        pytest.fail("the S3 server's environment is missing: run `make s3_server` once (or `make test-all`)")
    port = free_port()
    with (folder / "s3_server.log").open("w") as log:
        process = subprocess.Popen([str(SERVER), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    named = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "nothing-secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    os.environ.update(named)
    try:
        system = fs.S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True)
        deadline = time.monotonic() + 60
        while True:
            try:
                system.create_dir(BUCKET)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "s3_server.log").read_text()
                time.sleep(0.2)
        yield system
    finally:
        process.kill()
        process.wait()
        for name in named:
            os.environ.pop(name, None)


def objects(system: fs.S3FileSystem, folder: str) -> dict[str, int]:
    """Return {name: bytes} of the objects in a folder of the bucket."""
    root = f"{BUCKET}/{folder}"
    found = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    return {info.path.removeprefix(f"{root}/"): info.size for info in found if info.type == fs.FileType.File}
