"""Evidence beside the scores: what an unlearned model says, is like, and changed."""
