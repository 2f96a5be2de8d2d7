"""Request -> scheduler -> runner -> engine."""
