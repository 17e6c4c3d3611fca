"""What is wrong with a hostfile, ds_config, accelerate config or recipe, and with pairs of them. Imports no torch.

errors/lint_rules.yaml has every rule. Checks that a run makes too stand where the run makes them (train/strategy/,
train/recipe/hostfile.py), as generators of findings; here stands what only lint says.
"""
