"""What is wrong with a hostfile, ds_config, accelerate config or recipe, and with pairs of them. Imports no torch.

errors/rules.yaml has every rule. The checks that a run makes too live where the run makes them (strategy/, cluster.py), as
generators of findings; here is what only lint says.
"""
