"""Who else works on a host. By the standard library alone."""

import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import Any

PEOPLE = 1000  # UID_MIN of login.defs: lower ones are the system's
NOBODY = range(65534, 65536)  # of services, and of users of other namespaces


def look() -> dict[str, Any]:
    """others: names of other people who have processes here; hidden: the kernel does not list them (hidepid)"""
    users, hidden = set(), not Path("/proc/1").exists()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                users.add(entry.stat().st_uid)
    others = {user for user in users if user >= PEOPLE and user not in NOBODY and user != os.geteuid()}
    return {"others": sorted(map(_name, others)), "hidden": hidden}


def _name(user: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return str(user)
