"""Models that continue text: one step over the tokens of many requests, from export to a sampled answer."""
