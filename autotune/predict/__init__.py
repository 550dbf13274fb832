"""Peak memory and step time of a candidate without running it."""
