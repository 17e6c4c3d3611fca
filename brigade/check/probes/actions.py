"""What changes something on a host, where the user asks for it: a cure, a proof that is kept, the end of a rehearsal."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...errors.tables import Fields
from ...hosts import Facts

LAST = 15  # lines of what it prints


def run(line: str, limit: float) -> Facts:
    """Run a shell line. code: its exit code, None where it was ended after `limit` seconds; said: its last lines"""
    streams: Fields = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["bash", "-c", line], text=True, errors="replace", start_new_session=True, **streams)
    try:
        said, _ = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        code = None
    return {"code": code, "said": said.strip().splitlines()[-LAST:]}


def prove(recipe: str, flags: list[str], quick: bool) -> Facts:
    """The proof of kernels/prove.py, which is kept for later runs of this host; problem: why there is none."""
    from ...kernels import auto, models, proofs
    from ...kernels import prove as proving
    from ...train.model.location import load_config
    from ...train.recipe.flags import load

    try:
        settings = load(["--recipe", recipe, *flags])
        config = models.as_json(load_config(settings))
        proof = proving.on_this_host(config, proving.shapes_of(settings), quick, **auto.words_for(settings))
    except UserError as error:
        return {"problem": f"{error.place}: {error.problem}"}
    if proving.proven_times(proof):
        proofs.write(proof)
    return proof


def remove(directory: str) -> Facts:
    """Remove a rehearsal's directory, and nothing that is none."""
    path = Path(directory)
    if path.name.startswith("rehearsal-") and (path / "rehearsal.yaml").is_file():
        shutil.rmtree(path, ignore_errors=True)
    return {"left": path.is_dir()}
