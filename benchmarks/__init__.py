"""Measurements that anyone can repeat, one command each."""
