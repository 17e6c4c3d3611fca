"""The versions of huggingface/trl#4631, in which ZeRO-2 gave other gradients: Transformers' Trainer, asked about ZeRO alone."""

from benchmarks.court.peers import record
from benchmarks.court.peers.transformers import answer as by_trainer


def answer(job: record.Job) -> str:
    if job["question"] not in ("zero2", "zero3", "lora-zero3"):
        raise record.Refused("asked about ZeRO alone")
    return by_trainer(job)
