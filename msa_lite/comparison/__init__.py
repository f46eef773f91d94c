"""Put models side by side: their reports on shared rows, the paper's ratios, and tables in five formats."""
