"""Will it fit, and how fast is it? Models in numbers, costs, a choice among strategies, and how it is shown."""
