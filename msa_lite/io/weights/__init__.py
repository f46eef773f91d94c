"""Checkpoints and adapters on disk and on the Hub: headers, names, blocks of rows, writing."""
