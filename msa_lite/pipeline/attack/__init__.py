"""Attacks on the models of a run."""
