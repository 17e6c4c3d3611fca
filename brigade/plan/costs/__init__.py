"""Count what a training step costs in memory and time, for a Job as train.py runs it.

Functions under @singledispatch have another formula for the jobs of benchmarks/published, which other frameworks run.
"""
