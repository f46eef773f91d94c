"""What a fit minimises: the plain loss of rows, packed or padded, and losses beside a reference."""
