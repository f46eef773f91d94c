"""All that is known of a merge before the first byte is written: its inputs, their fit, memory, and likeness."""
