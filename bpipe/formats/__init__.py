"""Read and write schedules: CSV, grid, JSON, listing, and the form of torch's runtime."""
