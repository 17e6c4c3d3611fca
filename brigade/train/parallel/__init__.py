"""Mechanics of the axes besides data parallelism, known to no Trainer. Imported by the engines that use them alone."""
