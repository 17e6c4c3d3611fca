"""Mechanics of the axes besides data parallelism. Nobody loads this room whose strategy has none."""
