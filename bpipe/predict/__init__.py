"""Models, clusters and what they imply: bytes, FLOPs and seconds, by formula."""
