"""A job as a manifest of Kubeflow Trainer's TrainJob (v2, trainer.kubeflow.org/v1alpha1).

Held against the models of kubeflow-trainer-api by the tests; not yet run on a cluster.
"""

from typing import Any

from .job import Job
from .job_script import (
    NOTICE,
    TORCHRUN_OPTIONS,
    dns_name,
    header,
    name,
    remote_output,
    secrets,
    slots,
    to_yaml,
    train_words,
)

SUFFIX = ".trainjob.yaml"

_COMMENTS = {
    "image": "change: this project as its working directory, with what requirements.txt names",
    "claimName": "change: a volume that all pods may write (ReadWriteMany)",
    "terminationGracePeriodSeconds": "from SIGTERM to SIGKILL, to save in",
    "medium": "NCCL shares memory between ranks; a container's own /dev/shm has 64 MiB",
}


def document(job: Job) -> dict[str, Any]:
    """The TrainJob. The runtime tells torchrun hosts, ranks and meeting point by PET_* variables (its torch plugin)."""
    ranks = slots(job)
    words = ["torchrun", *TORCHRUN_OPTIONS, *train_words(job, remote_output(job))]
    gpus = job.settings.recipe.cluster.gpu is not None
    trainer: dict[str, Any] = {
        "image": "REGISTRY/brigade:TAG",
        "command": [word.replace("$", "$$") for word in words],  # Kubernetes would expand $(NAME)
        "numNodes": len(job.hosts),
        "numProcPerNode": ranks,
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": str(ranks)}} if gpus else {"requests": {"cpu": str(ranks)}},
    }
    if secrets(job):
        key = "secretKeyRef"
        trainer["env"] = [
            {"name": each, "valueFrom": {key: {"name": "brigade", "key": each, "optional": True}}}
            for each in secrets(job)
        ]
    pod = {
        "terminationGracePeriodSeconds": NOTICE,
        "volumes": [
            {"name": "outputs", "persistentVolumeClaim": {"claimName": "brigade-outputs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [
            {
                "name": "node",
                "volumeMounts": [
                    {"name": "outputs", "mountPath": "/outputs"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": dns_name(job)},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": trainer,
            # TrainJob has no restart policy of its own; this is all of it that concerns pre-emption.
            "runtimePatches": [
                {
                    "manager": "brigade/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def text(job: Job) -> str:
    """The manifest. Raises UserError for hosts of different sizes, and for flags that cannot be said twice."""
    needed = secrets(job)
    literals = " ".join(f"--from-literal={each}=..." for each in needed)
    lines = [
        f"Start, with Kubeflow Trainer 2.2 or newer: kubectl apply -f {name(job)}{SUFFIX}",
        "Change: image, claimName; resourcesPerNode, where pods must ask for cores and memory. For Kueue add the label",
        "kueue.x-k8s.io/queue-name and suspend: true.",
        *([f"Secrets, once: kubectl create secret generic brigade {literals}"] if needed else []),
        "A pod that fails or is evicted starts again (JobSet's restartPolicy OnFailure, up to its Job's backoffLimit 6),",
        "torchrun ends on the others and starts again with it, and the run goes on from its newest checkpoint. Another",
        "policy is the runtime's: copy torch-distributed, set failurePolicy there, and name the copy in runtimeRef.",
    ]
    return header(job, "kubernetes", *lines) + to_yaml(document(job), _COMMENTS)
