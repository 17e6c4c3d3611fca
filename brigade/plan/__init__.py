"""Will it fit, and how fast is it? Costs, a choice among strategies, and how it is shown."""
