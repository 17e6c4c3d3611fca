"""The cluster while it trains, in a terminal: what hosts and ranks say (watching), and the table of it (table)."""
