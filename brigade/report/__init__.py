"""A page for the browser of what runs left behind: their records, figures and charts, comparisons, and the page itself."""
