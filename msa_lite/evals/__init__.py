"""Scores of models on questions with known answers: pure metrics, generation, and benchmarks built of them."""
