"""What a step minimises: the losses of answers, pairs and judged answers, their terms, tiles and references."""
