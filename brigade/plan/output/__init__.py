"""How a plan is shown, written and drawn."""
