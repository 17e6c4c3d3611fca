"""Mechanics of the axes besides data parallelism: tensor, pipeline, sequence and expert parallelism. No Trainer here."""
