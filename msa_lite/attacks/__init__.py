"""Attacks: does an unlearned model give back what it was to forget? One module an attack."""
