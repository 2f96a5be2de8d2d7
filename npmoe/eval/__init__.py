"""What a cache format costs in quality: `npmoe eval`."""
