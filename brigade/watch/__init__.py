"""Watching a run: throughput, memory, balance between ranks, progress, and what each rank holds."""
