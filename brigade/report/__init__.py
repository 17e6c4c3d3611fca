"""What runs left behind as a page for the browser: reading, figures and charts, comparing, page."""
