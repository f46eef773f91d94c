"""Run models: load them, score texts, answer prompts; and the scores of one item."""
