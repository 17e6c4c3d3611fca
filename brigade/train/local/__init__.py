"""Replicas that exchange weights every so many steps, with a fixed number of them or whoever is there."""
