"""What is wrong with a hostfile, ds_config, accelerate config or recipe, and with pairs of them. Imports no torch.

rules.yaml names every rule, rules.py has what a rule finds. The checks that a run makes too live where the run makes
them (strategy/deepspeed.py, strategy/accelerate.py, cluster.py), as generators of findings; here is what only lint says.
"""
