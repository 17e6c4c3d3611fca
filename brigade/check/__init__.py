"""Preflight: is the cluster sound, before a run starts on it?"""
