"""A model in numbers: what its config.json states, or its code builds and keeps. It knows neither clusters nor plans."""
