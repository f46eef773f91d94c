"""Several processes on one job: ranks, orders, gathering, and the end of one of them."""
