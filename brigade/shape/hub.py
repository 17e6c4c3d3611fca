"""Whether Hugging Face's Hub can be reached."""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies


@functools.cache
def hub_is_away() -> str:
    """`huggingface.co does not resolve, and the cache does not have it`, or "".

    Where its name does not resolve, Hugging Face's libraries are told to look into their caches alone: they would ask for each
    file six times, 23 s with a line for each (huggingface_hub/utils/_http.py: http_backoff). A proxy resolves names itself.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    if getproxies() or os.environ.get("HF_HUB_OFFLINE"):
        return ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # of libraries that are loaded later, and of processes
        if "huggingface_hub" in sys.modules:
            sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True
        return f"{host} does not resolve, and the cache does not have it"
    return ""
