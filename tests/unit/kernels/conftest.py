"""What the tests of kernels share: a cache of their own, and a host with GPUs that nobody has."""

import pytest

from brigade.kernels import proofs, prove


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def on(monkeypatch):
    """on(device): this host has one of it."""

    def have(device):
        monkeypatch.setattr(proofs, "device", lambda index=0: device)
        facts = {"is_available": True, "device_count": 8, "get_device_name": device["name"]}
        facts["get_device_capability"] = divmod(round(10 * device["capability"]), 10)
        for name, value in facts.items():
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)

    return have


@pytest.fixture
def made(monkeypatch):
    """made(proof or error): what the short proof of a first run comes to. Returns the calls."""
    calls = []

    def answer(what):
        def on_this_host(*args, **named):
            calls.append((args, named))
            if isinstance(what, Exception):
                raise what
            return what

        monkeypatch.setattr(prove, "on_this_host", on_this_host)
        return calls

    return answer
