"""The user's own ssh: what each of our calls has to say, and which keys it cannot use without being asked."""

import base64
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

# What ~/.ssh/config may say of a host for logins by hand, and no line to an agent works with. How long a line may be silent is
# ours to say: ServerAliveInterval would cut it before.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=0", "RemoteCommand=none")
# What only the user should use, and a host could: the ssh agent, the display, the ports.
_NOT_LENT = ("ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes")
_SINCE_8_7 = ("StdinNull=no", "ForkAfterAuthentication=no", "SessionType=default")  # an older ssh would refuse them


@cache
def version() -> tuple[int, int]:
    """Return the version of OpenSSH here, (0, 0) where it is not known."""
    found = re.match(r"OpenSSH_(\d+)\.(\d+)", said("ssh", "-V"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def options() -> list[str]:
    """The flags of every ssh that is started."""
    named = _OPTIONS + _NOT_LENT + (_SINCE_8_7 if version() >= (8, 7) else ())
    return ["-T", "-a", "-x", *(word for option in named for word in ("-o", option))]


@cache
def locked_key(host: str) -> str:
    """A key that ssh would show this host, if it could ask for its passphrase: no agent has it. "" for none."""
    held = said("ssh-add", "-L")
    lines = (line.partition(" ") for line in said("ssh", "-G", "--", host).splitlines())
    for name in (value for key, _, value in lines if key == "identityfile"):
        path = Path(name).expanduser()
        with suppress(OSError, ValueError, IndexError):
            if is_locked(path) and path.with_name(f"{path.name}.pub").read_text().split()[1] not in held:
                return str(path)
    return ""


def is_locked(path: Path) -> bool:
    """Tell whether a private key has a passphrase. Raises OSError, and ValueError for what is no key.

    OpenSSH's own form names the cipher after "openssh-key-v1\\0" and a length of four bytes (its PROTOCOL.key).
    """
    first, *rest = path.read_text(encoding="ascii").strip().splitlines()
    if "OPENSSH PRIVATE KEY" not in first:
        return "ENCRYPTED" in f"{first} {' '.join(rest[:1])}"
    return not base64.b64decode("".join(rest[:-1]))[15:].startswith(b"\0\0\0\4none")


def said(*words: str) -> str:
    """The output of a program of OpenSSH, "" where there is none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=5
        )
        return done.stdout + done.stderr
    return ""
