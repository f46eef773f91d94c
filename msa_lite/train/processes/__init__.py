"""One full fit over several processes, each with a shard of all weights (FSDP2)."""
