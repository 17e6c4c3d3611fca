"""Parse SkyPilot tasks with SkyPilot: `.venv/skypilot/bin/python tests/jobs/parse_sky.py FILE...` prints what it read.

Fails, as SkyPilot does, for what its schema does not know. Offline: it asks no cloud which GPUs there are.
"""

import json
import sys
from pathlib import Path

import sky
import yaml
from sky.utils import schemas


def parse(path: str) -> dict[str, object]:
    # In resources a client lets unknown keys pass, for plugins on its server; ours must be in the schema.
    resources = yaml.safe_load(Path(path).read_text())["resources"]
    unknown = set(resources) - set(schemas.get_resources_schema()["properties"])
    if unknown:
        raise ValueError(f"{path}: resources has no {sorted(unknown)}")
    task = sky.Task.from_yaml(path)
    (resource,) = task.resources
    return {
        "name": task.name,
        "num_nodes": task.num_nodes,
        "accelerators": resource.accelerators,
        "cpus": resource.cpus,
        "use_spot": resource.use_spot,
        "job_recovery": resource.job_recovery,
        "envs": task.envs,
        "secrets": sorted(reference.name for reference in task.managed_secret_refs),
        "storage": sorted(task.storage_mounts),
        "setup": task.setup,
        "run": task.run,
    }


print(json.dumps({path: parse(path) for path in sys.argv[1:]}))
