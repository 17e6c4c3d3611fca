"""How fast hosts exchange what training exchanges."""
